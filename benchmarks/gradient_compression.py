"""Ways to spend fewer bytes on an optimizer, side by side on one language model.

  python benchmarks/gradient_compression.py --out compression.jsonl     # goes on where it stopped
  python benchmarks/gradient_compression.py --out compression.jsonl --report

Task: the byte-level decoder of ``examples/`` on the source text of Python's standard library.
Each method first runs over a few learning rates with a seed of its own, and then with the
best over the seeds that are reported. Every finished run is one JSON line.

Columns: bytes of optimizer state; peak bytes of a compiled train step (arguments, results and
temporaries, less what is donated); validation loss, mean ± standard error over the seeds;
step time over Adam's, the median of rounds in which all take turns; and what the compression
loses, over all parameters, as the mean of every 20th step: the distortion ‖G − G̃‖/‖G‖ and the
cosine of G̃, the gradient that the optimizer behind the compression sees, and G. Of FP8
moments it is those of the stored first moment and the exact one, since that is what they round.

(A script called compression.py would hide a module of that name of Python's standard library.)
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import compression_baselines as baselines
import harness
import lowrank_optax as lro

data, optimizers = harness.example("data"), harness.example("optimizers")
examples_decoder = harness.example("decoder")

RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
TUNING_SEED = 1000
SAMPLE_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Size:
    """The task.

    Attributes:
        width: of the residual stream.
        layers: number of blocks.
        length: bytes a window.
        batch: windows a step.
        steps: updates a run.
        text: bytes of text.
    """

    width: int = 64
    layers: int = 2
    length: int = 64
    batch: int = 16
    steps: int = 400
    text: int = 2_000_000


@functools.cache
def task(size: Size) -> tuple[Callable, Callable, data.Corpus]:
    """Init, loss and text."""
    config = examples_decoder.DecoderConfig.tiny(
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 32),
        num_key_value_heads=max(1, size.width // 32),
        tie_word_embeddings=False,
    )
    init, apply = examples_decoder.functional(config)

    def loss(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return examples_decoder.next_token_loss(logits, tokens[:, 1:])

    corpus = data.split(data.standard_library(size.text), size.length)
    return jax.jit(init), jax.jit(loss), corpus


# Methods. Each makes an optimizer of a schedule, and says what became of a gradient: from
# (gradients, state before, state after) to the pair of trees (true, compressed).


def _untouched(grads, before, after):
    del before, after
    return grads, grads


def _first_of_chain(transform):
    def seen(grads, before, after):
        del after
        return grads, transform.update(grads, before[0])[0]

    return seen


def _rounded_moment(grads, before, after):
    exact, _ = baselines.next_moments(grads, before[0], 0.9, 0.999)
    stored, _ = baselines.moments(after[0], grads)
    return exact, stored


def _projected(grads, before, after):
    del before
    tracker = after.tracker_state
    leaves, treedef = jax.tree.flatten(grads)
    pairs = zip(tracker.encoders(), tracker.decoders(), strict=True)
    for index, (encoder, decoder) in zip(tracker.plan.targets, pairs, strict=True):
        view = tracker.plan.leaves[index].view
        leaves[index] = view.lift(view.project(leaves[index], encoder), decoder)
    return grads, jax.tree.unflatten(treedef, leaves)


def scaled_table(width: int) -> dict[str, int]:
    """LoGRA's ranks (128, 64, 32 and 256, for a model of width 512 or so) at this width."""
    ranks = {"embedding": 128, "attention": 64, "mlp": 32, "head": 256}
    return {name: max(1, rank * width // 512) for name, rank in ranks.items()}


def uniform_rank(size: Size) -> int:
    """The one rank whose optimizer state is nearest to the table's in bytes."""
    init, _, _ = task(size)
    params = jax.eval_shape(init, jax.random.key(0))

    def state_bytes(ranks: dict[str, int]) -> int:
        return lro.describe(
            lro.logra_adamw(1.0, targets=lro.targets.logra(**ranks)), params
        ).state_bytes

    wanted = state_bytes(scaled_table(size.width))

    def excess(rank: int) -> int:
        return abs(state_bytes(dict.fromkeys(scaled_table(size.width), rank)) - wanted)

    return min(range(1, size.width // 2), key=excess)


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to compress.

    Attributes:
        make: an optimizer from a learning-rate schedule.
        seen: what became of a gradient.
    """

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    seen: Callable[..., tuple[Any, Any]]


def methods(size: Size) -> dict[str, Method]:
    """All of them by name."""
    tenth = baselines.sparsify_top_k(0.1, error_feedback=False)
    tenth_ef = baselines.sparsify_top_k(0.1, error_feedback=True)
    fp8 = baselines.scale_by_adam_fp8()
    quarter, half = size.width // 4, size.width // 2
    table = lro.targets.logra(**scaled_table(size.width))
    one = uniform_rank(size)
    uniform = lro.targets.logra(**dict.fromkeys(scaled_table(size.width), one))

    def after(first):
        return lambda rate: optax.chain(first, optax.adam(rate))

    def logra(**options):
        return lambda rate: lro.logra_adamw(rate, **options)

    return {
        "Adam": Method(optax.adam, _untouched),
        "Adam, FP8 moments": Method(
            lambda rate: optax.chain(fp8, optax.scale_by_learning_rate(rate)), _rounded_moment
        ),
        "top 10 %, then Adam": Method(after(tenth), _first_of_chain(tenth)),
        "top 10 % with error feedback, then Adam": Method(
            after(tenth_ef), _first_of_chain(tenth_ef)
        ),
        f"GaLore, rank {quarter}": Method(
            lambda rate: lro.galore_adamw(rate, quarter, refresh_every=50, scale=1.0), _projected
        ),
        f"LoGRA, rank {quarter}": Method(logra(rank=quarter), _projected),
        f"LoGRA, rank {half}": Method(logra(rank=half), _projected),
        "LoGRA, ranks by layer": Method(logra(targets=table), _projected),
        f"LoGRA, rank {one} in the same layers": Method(logra(targets=uniform), _projected),
    }


# Runs


class Compiled(NamedTuple):
    """What one method runs, for all learning rates and seeds.

    Attributes:
        init: from params to the optimizer state.
        step: one update of ``(params, state)``, which are donated, given tokens and a rate.
        measure: norms of the gradient, of what is seen of it and of their difference; and the
            product of the first two.
        peak_bytes: of the step.
    """

    init: Callable
    step: Callable
    measure: Callable
    peak_bytes: int


@functools.cache
def compiled(name: str, size: Size) -> Compiled:
    """Compiles a method's functions."""
    init, loss, corpus = task(size)
    method = methods(size)[name]
    shape = optimizers.make_schedule(1.0, size.steps, min(20, size.steps // 10), "cosine")

    def optimizer(rate):
        # The rate is an argument of the step, so that one compilation serves all.
        return method.make(lambda count: rate * shape(count))

    def step(params, state, tokens, rate):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer(rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def measure(params, state, tokens, rate):
        tx, grads = optimizer(rate), jax.grad(loss)(params, tokens)
        _, after = tx.update(grads, state, params)
        true, seen = method.seen(grads, state, after)
        lost = jax.tree.map(jnp.subtract, true, seen)
        norms = map(optax.tree.norm, (true, seen, lost))
        return (*norms, optax.tree.vdot(true, seen))

    params = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(optimizer(0.0).init, params)
    shapes = params, state, corpus.batch(0, 0, size.batch), jnp.float32(0)
    stepped = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
    measured = jax.jit(measure).lower(*shapes).compile()
    return Compiled(jax.jit(optimizer(0.0).init), stepped, measured, peak_bytes(stepped))


def peak_bytes(compiled) -> int:
    sizes = compiled.memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes
        - sizes.alias_size_in_bytes
    )


def run(name: str, rate: float, seed: int, size: Size) -> dict[str, Any]:
    """Trains once."""
    init, loss, corpus = task(size)
    functions = compiled(name, size)
    params = init(jax.random.key(seed))
    state = functions.init(params)
    rate = jnp.float32(rate)
    distortions, cosines = [], []
    for number in range(size.steps):
        tokens = corpus.batch(seed, number, size.batch)
        if number % SAMPLE_EVERY == 0:
            norms = functions.measure(params, state, tokens, rate)
            true, seen, lost, dot = map(float, norms)
            distortions.append(lost / true)
            cosines.append(dot / (true * seen) if seen else 0.0)
        params, state, _ = functions.step(params, state, tokens, rate)
    batches = list(corpus.validation_batches(size.batch))
    total = sum(float(loss(params, batch)) * len(batch) for batch in batches)
    return {
        "score": total / sum(map(len, batches)),
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "peak_bytes": functions.peak_bytes,
        "distortion": statistics.mean(distortions),
        "cosine": statistics.mean(cosines),
    }


def time_steps(names: list[str], rounds: int, size: Size) -> dict[str, list[float]]:
    """Seconds of ten steps, by method: one entry a round, in which all take turns."""
    init, _, corpus = task(size)
    tokens, rate = corpus.batch(0, 0, size.batch), jnp.float32(1e-3)
    turns = {}
    for name in names:
        params = init(jax.random.key(0))
        turns[name] = params, compiled(name, size).init(params)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # Every other round backwards, so that nobody always runs after the same neighbour.
        for name in names if number % 2 == 0 else names[::-1]:
            step, (params, state), value = compiled(name, size).step, turns[name], None
            begin = time.perf_counter()
            for _ in range(10):
                params, state, value = step(params, state, tokens, rate)
            jax.block_until_ready(value)
            seconds[name].append(time.perf_counter() - begin)
            turns[name] = params, state
    return seconds


# The file of results


def key_of(record: dict[str, Any]) -> tuple:
    size = tuple(sorted(record["size"].items()))
    return record["kind"], record["method"], record.get("rate"), record.get("seed"), size


class Results:
    """Finished runs, one JSON line each."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.records: dict[tuple, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the half-written end of a run that was killed
            self.records[key_of(record)] = record

    def once(self, make: Callable[[], dict[str, Any]], **about: Any) -> dict[str, Any]:
        """The record of this description, made and written unless it is there."""
        if key_of(about) not in self.records:
            begin = time.perf_counter()
            record = about | make()
            record["wall_s"] = round(time.perf_counter() - begin, 1)
            self.records[key_of(about)] = record
            with self._path.open("a") as file:
                print(json.dumps(record), file=file)
            print(f"{record['wall_s']:6.1f} s  {about}", file=sys.stderr, flush=True)
        return self.records[key_of(about)]

    def of(self, kind: str, method: str, size: Size) -> Iterator[dict[str, Any]]:
        """All records of one kind, method and size."""
        for record in self.records.values():
            found = record["kind"], record["method"], record["size"]
            if found == (kind, method, dataclasses.asdict(size)):
                yield record


def measure(results: Results, names: list[str], seeds: list[int], rounds: int, size: Size) -> None:
    about = {"size": dataclasses.asdict(size)}
    for name in names:
        for rate in RATES:
            results.once(
                functools.partial(run, name, rate, TUNING_SEED, size),
                kind="tuning",
                method=name,
                rate=rate,
                seed=TUNING_SEED,
                **about,
            )
    for seed in seeds:
        for name in names:
            best = min(results.of("tuning", name, size), key=lambda record: record["score"])
            results.once(
                functools.partial(run, name, best["rate"], seed, size),
                kind="run",
                method=name,
                rate=best["rate"],
                seed=seed,
                **about,
            )
    if not all(any(results.of("time", name, size)) for name in names):
        seconds = time_steps(names, rounds, size)
        for name in names:
            results.once(
                lambda name=name: {"seconds": seconds[name], "adam": seconds["Adam"]},
                kind="time",
                method=name,
                **about,
            )


def report(results: Results, names: list[str], size: Size) -> str:
    rows = []
    for name in names:
        runs = list(results.of("run", name, size))
        if not runs:
            continue
        scores = [record["score"] for record in runs]
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        ratio = "—"
        for record in results.of("time", name, size):
            pairs = zip(record["seconds"], record["adam"], strict=True)
            ratio = f"{statistics.median(ours / adam for ours, adam in pairs):.2f}"
        rates = sorted({record["rate"] for record in runs})
        rows.append(
            [
                name,
                f"{runs[0]['state_bytes']:,}",
                f"{runs[0]['peak_bytes']:,}",
                f"{statistics.mean(scores):.4f} ± {error:.4f}",
                ratio,
                f"{statistics.mean(r['distortion'] for r in runs):.3f}",
                f"{statistics.mean(r['cosine'] for r in runs):.3f}",
                ", ".join(f"{rate:g}" for rate in rates),
            ]
        )
    head = ("method", "state bytes", "peak bytes", "validation loss", "step ÷ Adam")
    return harness.table([*head, "distortion", "cosine", "learning rate"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("compression.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20, help="turns that the timing takes")
    parser.add_argument("--size", type=lambda text: Size(**json.loads(text)), default=Size())
    parser.add_argument("--methods", nargs="+", metavar="TEXT", help="those whose name holds it")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    args = parser.parse_args()
    names = list(methods(args.size))
    if args.methods:
        # Adam is what the times are compared with.
        chosen = {name for name in names if any(text in name for text in args.methods)}
        names = [name for name in names if name in chosen | {"Adam"}]
    results = Results(args.out)
    if not args.report:
        measure(results, names, args.seeds, args.rounds, args.size)
    print(f"{args.size}, {len(args.seeds)} seeds")
    print(harness.versions("jax", "optax", "lowrank-optax"))
    print(report(results, names, args.size))


if __name__ == "__main__":
    main()
