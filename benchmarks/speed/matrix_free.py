"""Step time of the matrix-free backward pass, beside what it competes with.

Contenders take turns in one process, on the same model, tokens and targets:

- ``optax.adamw``: the yardstick;
- ``galore, full gradients``: ``lro.galore_adamw`` behind ``jax.value_and_grad``;
- ``galore, matrix-free``: the same behind ``lro.compact_value_and_grad``;
- ``frozen weights``: AdamW on what is no block matrix, the cost of LoRA-like training without its
  adapters;
- ``forward + backward``: full gradients, no optimizer.

  python -m benchmarks.speed.matrix_free
  python -m benchmarks.speed.matrix_free --tokens 1024 --rank 128 --rounds 9 --json times.json
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro
from benchmarks import harness, plain_decoder

# A refresh is a matter of the interval, not of the step; it is measured apart.
NEVER = 10**9
RATE = 1e-3


def _is_block_matrix(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: plain_decoder.is_block_matrix(str(path[-1].key)), params
    )


def make_step(contender: str, params, rank: int, every: int):
    """The optimizer and the ``(params, state, tokens) -> (params, state)`` of a contender."""
    matrices = _is_block_matrix(params)
    targets = jax.tree.map(lambda wanted: lro.Target(rank) if wanted else None, matrices)
    galore = functools.partial(lro.galore_adamw, RATE, rank, every, targets=targets)
    full = jax.value_and_grad(plain_decoder.loss)

    if contender == "galore, matrix-free":
        tx = galore()
        compact = lro.compact_value_and_grad(plain_decoder.loss)

        def step(params, state, tokens):
            _, grads, bases = compact(params, tokens, opt_state=state)
            updates, state = tx.update(grads, state, params, bases=bases)
            return optax.apply_updates(params, updates), state

        return tx, step
    if contender == "frozen weights":
        trained = jax.tree.map(lambda wanted: "none" if wanted else "adamw", matrices)
        tx = optax.partition({"adamw": optax.adamw(RATE), "none": optax.set_to_zero()}, trained)

        def step(params, state, tokens):
            def loss(params):
                frozen = jax.tree.map(
                    lambda x, wanted: jax.lax.stop_gradient(x) if wanted else x, params, matrices
                )
                return plain_decoder.loss(frozen, tokens)

            grads = jax.grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            # Frozen weights are not written at all.
            new = jax.tree.map(
                lambda p, u, wanted: p if wanted else p + u, params, updates, matrices
            )
            return new, state

        return tx, step
    if contender == "forward + backward":

        def step(params, state, tokens):
            value, grads = full(params, tokens)
            # Every gradient is made and read, none is kept.
            return params, state + value + optax.tree.norm(grads)

        return optax.GradientTransformation(lambda _: jnp.zeros([]), lambda *_: _), step
    tx = optax.adamw(RATE) if contender == "optax.adamw" else galore()

    def step(params, state, tokens):
        _, grads = full(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


CONTENDERS = (
    "optax.adamw",
    "galore, full gradients",
    "galore, matrix-free",
    "frozen weights",
    "forward + backward",
)


class Contender:
    """A compiled, donating step that goes on and on."""

    def __init__(self, name: str, size: plain_decoder.Size, rank: int, every: int = NEVER):
        params = jax.tree.map(jnp.array, plain_decoder.init(size))
        tx, step = make_step(name, params, rank, every)
        state = jax.jit(tx.init)(params)
        self.tokens = jnp.asarray(plain_decoder.batches(size, 4))
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, self.tokens[0])
        self.trace_s = time.perf_counter() - start
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.state = (params, state)
        self.turn = 0
        self()  # the first step refreshes

    def __call__(self) -> None:
        """One step, waited for."""
        tokens = self.tokens[self.turn % len(self.tokens)]
        self.turn += 1
        self.state = self.compiled(*self.state, tokens)
        jax.block_until_ready(self.state)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: tokens a step, rank, and each contender's seconds, round by round."""

    tokens: int
    rank: int
    seconds: dict[str, list[float]]
    compile_s: dict[str, float]
    refresh_s: list[float]

    def row(self) -> list[str]:
        """Ratios to AdamW of the same round."""
        adamw = self.seconds["optax.adamw"]
        cells = [str(self.tokens), str(self.rank), f"{harness.Spread.of(adamw).scaled(1e3):.0f} ms"]
        for name in CONTENDERS[1:]:
            pairs = zip(self.seconds[name], adamw, strict=True)
            cells.append(f"{harness.Spread.of([a / b for a, b in pairs]):.2f}")
        compile_ratio = self.compile_s["galore, matrix-free"] / self.compile_s["optax.adamw"]
        refresh = harness.Spread.of([s / b for s, b in zip(self.refresh_s, adamw, strict=False)])
        return [*cells, f"{refresh:.1f}", f"{compile_ratio:.1f}"]


def measure(tokens: int, rank: int, rounds: int, size: plain_decoder.Size) -> Case:
    """Times all contenders in turn, ``rounds`` times."""
    length = min(tokens, 256)
    size = dataclasses.replace(size, batch=tokens // length, length=length)
    contenders = {name: Contender(name, size, rank) for name in CONTENDERS}
    refreshing = Contender("galore, matrix-free", size, rank, every=1)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    refresh_s = []
    for number in range(rounds):
        order = list(contenders)
        # Another one goes first each time, so that none always follows the same neighbour.
        shift = number % len(order)
        for name in order[shift:] + order[:shift]:
            seconds[name].append(harness.timed(contenders[name])[0])
        if number < 3:
            refresh_s.append(harness.timed(refreshing)[0])
    compile_s = {name: contender.compile_s for name, contender in contenders.items()}
    return Case(tokens, rank, seconds, compile_s, refresh_s)


def main() -> None:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rank", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    size = plain_decoder.Size(
        width=args.width, hidden=args.width * 8 // 3 // 64 * 64, layers=args.layers
    )
    print(harness.versions("jax", "optax", "lowrank-optax"))
    print(f"width {size.width}, hidden {size.hidden}, layers {size.layers}, float32\n")
    cases = []
    for rank in args.rank:
        for tokens in args.tokens:
            cases.append(measure(tokens, rank, args.rounds, size))
            print(cases[-1].row(), flush=True)
            if args.json:
                args.json.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    head = ["tokens", "rank", "adamw", *CONTENDERS[1:], "refresh step", "compile"]
    print("\nTimes as shares of optax.adamw's: median (quartiles).\n")
    print(harness.table(head, [case.row() for case in cases]))


if __name__ == "__main__":
    main()
