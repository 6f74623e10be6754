"""What happens to the loss when an optimizer is exchanged in the middle of a run.

  python -m benchmarks.compression.migration

The task of ``gradient_compression.py``. From one point of a run, training goes on three ways:
with the optimizer as it was, with the new one and its migrated state, and with the new one from
scratch. Shown is the validation loss, after some steps, less that at the exchange.
"""

import argparse
import json

import jax
import optax

import lowrank_optax as lro
from benchmarks import harness
from benchmarks.compression.task import Size, make_task

SHOWN = (1, 2, 5, 10, 20, 50)


def exchanges(size: Size, rate: float) -> dict[str, list]:
    """Name to the optimizers that follow each other."""

    def galore(targets, **options):
        return lro.galore_adamw(rate, refresh_every=50, scale=1.0, targets=targets, **options)

    def blocks(rank, **options):
        return galore(None, rank=rank, **options)

    eighth, quarter, half = (size.width // share for share in (8, 4, 2))
    mlp, attention = ("mlp", quarter), ("attn", quarter)
    rest = [("embed", quarter), ("lm_head", quarter)]
    stages = [[mlp], [mlp, attention], [mlp, attention, *rest]]
    return {
        f"AdamW → rank {quarter}": [optax.adam(rate), blocks(quarter)],
        f"rank {quarter} → AdamW": [blocks(quarter), optax.adam(rate)],
        f"rank {eighth} → {half}": [blocks(eighth), blocks(half)],
        f"rank {half} → {eighth}": [blocks(half), blocks(eighth)],
        "smaller → larger side": [blocks(quarter), blocks(quarter, side="larger")],
        "refreshed → learned basis": [blocks(quarter), lro.logra_adamw(rate, quarter)],
        "MLP → attention → embedding and head": [galore(targets) for targets in stages],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=lambda text: Size(**json.loads(text)), default=Size())
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--before", type=int, default=300, help="steps before an exchange")
    args = parser.parse_args()
    init, loss, corpus = make_task(args.size)
    windows = list(corpus.validation_batches(args.size.batch))

    def validate(params) -> float:
        total = sum(float(loss(params, batch)) * len(batch) for batch in windows)
        return total / sum(map(len, windows))

    def go_on(tx, params, state, first: int, steps: int):
        @jax.jit
        def step(params, state, tokens):
            updates, state = tx.update(jax.grad(loss)(params, tokens), state, params)
            return optax.apply_updates(params, updates), state

        losses = []
        for number in range(steps):
            params, state = step(params, state, corpus.batch(0, first + number, args.size.batch))
            if number + 1 in SHOWN:
                losses.append(validate(params))
        return params, state, losses

    rows = []
    for name, optimizers in exchanges(args.size, args.rate).items():
        old, count = optimizers[0], args.before
        params = init(jax.random.key(0))
        params, state, _ = go_on(old, params, old.init(params), 0, count)
        for new in optimizers[1:]:
            before = validate(params)
            moved = lro.migrate(state, old, new, params)
            ways = {
                "as it was": go_on(old, params, state, count, SHOWN[-1]),
                "from scratch": go_on(new, params, new.init(params), count, SHOWN[-1]),
                "migrated": go_on(new, params, moved, count, SHOWN[-1]),
            }
            for way, (*_, losses) in ways.items():
                rows.append([name, way, f"{before:.4f}", *(f"{x - before:+.4f}" for x in losses)])
            params, state, _ = ways["migrated"]
            old, count = new, count + SHOWN[-1]
    print(f"{args.size}, learning rate {args.rate:g}")
    print(harness.versions("jax", "optax", "lowrank-optax"))
    head = ["exchange", "then", "loss before", *(f"{step} steps" for step in SHOWN)]
    print(harness.table(head, rows))


if __name__ == "__main__":
    main()
