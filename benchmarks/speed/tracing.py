"""How long tracing and compiling one update takes, by the number of weights.

  python -m benchmarks.speed.tracing
  python -m benchmarks.speed.tracing --optimizers galore_adamw optax.adamw --weights 50 100 200
  python -m benchmarks.speed.tracing --packages . ../another-clone    # versions side by side

The weights are not stacked: every one is a leaf of its own, ``(64, 128)`` and ``(64, 64)`` in
turn, and every one is projected. Traced is ``jax.jit(tx.update)`` on abstract arrays; compiling is
lowering and XLA. JAX's caches are cleared before each run, which therefore pays for everything
that an update of these shapes needs. Every version has a process of its own, and only its public
names are used; all take turns.

The exponent is that of the growth between the two largest numbers of weights, log(t₂/t₁) over
log(n₂/n₁): 1 where time grows linearly, 2 with the square. What does not depend on the number of
weights makes it smaller.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.speed.tracing"
CLOCKS = ("wall", "cpu")
SHAPES = ((64, 128), (64, 64))
RATE = 1e-3
OPTIMIZERS = (
    "optax.adamw",
    "lowrank_adamw",
    "galore_adamw",
    "logra_adamw",
    "fira_adamw",
    "apollo_adamw",
    "ldadamw",
    "galore_project:sketched",
    "galore_project:lion",
    "galore_project:int8",
)


def make_optimizer(name: str, rank: int) -> Any:
    """One of the optimizers, by the library's public names."""
    import jax.numpy as jnp
    import optax

    import lowrank_optax as lro

    if name == "optax.adamw":
        return optax.adamw(RATE)
    if not name.startswith("galore_project"):
        return getattr(lro, name)(RATE, rank=rank)
    basis = lro.refresh_basis(rank)
    if name.endswith("sketched"):
        return lro.galore_project(optax.adam(RATE), basis, lift=lro.sketched_residual_lift())
    if name.endswith("lion"):
        return lro.galore_project(lro.lion_momentum(), basis, lift=lro.sign_lift())
    # Down to the smallest size that it takes, since the moments of these weights are small.
    moments = lro.quantized_moments(optax.adam(RATE), jnp.int8, smallest=64)
    return lro.galore_project(moments, basis)


def make_params(weights: int) -> dict[str, Any]:
    """Abstract weights, not stacked."""
    import jax

    shapes = itertools.islice(itertools.cycle(SHAPES), weights)
    return {
        f"layer_{number:03}": {"kernel": jax.ShapeDtypeStruct(shape, "float32")}
        for number, shape in enumerate(shapes)
    }


class Update:
    """One update of an optimizer, on abstract arrays.

    Args:
        name: of the optimizer.
        weights: how many.
        rank: of the projection.
    """

    def __init__(self, name: str, weights: int, rank: int):
        import jax

        params = make_params(weights)
        tx = make_optimizer(name, rank)
        self._update = tx.update
        self._arguments = params, jax.eval_shape(tx.init, params), params
        self._traced: Any = None

    def trace(self) -> None:
        """Traces it."""
        import jax

        self._traced = jax.jit(self._update).trace(*self._arguments)

    def compile(self) -> None:
        """Lowers and compiles what was traced last."""
        self._traced.lower().compile()


def serve(package: str, args: argparse.Namespace) -> None:
    """A worker: traces and compiles with the version in a folder."""
    sys.path.insert(0, package)
    import jax

    import lowrank_optax

    update_of = functools.cache(lambda name, weights: Update(name, weights, args.rank))
    tasks: dict[str, Callable[[], object]] = {}
    before: dict[str, Callable[[], object]] = {}
    for name, weights in itertools.product(args.optimizers, args.weights):
        task = f"{name}/{weights}"
        tasks[f"trace/{task}"] = lambda key=(name, weights): update_of(*key).trace()
        tasks[f"compile/{task}"] = lambda key=(name, weights): update_of(*key).compile()
        before[f"trace/{task}"] = lambda key=(name, weights): update_of(*key)
        before[f"compile/{task}"] = tasks[f"trace/{task}"]

    def prepare(task: str) -> None:
        update = before[task]
        jax.clear_caches()
        update()
        if task.startswith("trace"):  # what making the optimizer's state has left
            jax.clear_caches()
        gc.collect()

    harness.serve(tasks, {"package": str(lowrank_optax.__file__)}, prepare)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds, round by round.

    Attributes:
        trace: to trace.
        compile: to lower and compile, empty where that was left out.
    """

    trace: list[float] = dataclasses.field(default_factory=list)
    compile: list[float] = dataclasses.field(default_factory=list)


def exponents(
    few: Sequence[float], many: Sequence[float], few_weights: int, many_weights: int
) -> list[float]:
    """Of the growth from few to many weights, round by round.

    Args:
        few: seconds with few weights.
        many: seconds with many.
        few_weights: how many these are.
        many_weights: likewise.
    """
    pairs = zip(few, many, strict=True)
    return [math.log(b / a) / math.log(many_weights / few_weights) for a, b in pairs]


Results = dict[tuple[str, str, int], Measured]
"""By package, optimizer and number of weights."""


def measure(workers: dict[str, harness.Worker], args: argparse.Namespace) -> Results:
    """Times everything, the packages in turn."""
    clock = CLOCKS.index(args.clock)
    cases = list(itertools.product(args.optimizers, args.weights))
    results: Results = {(package, *case): Measured() for case in cases for package in workers}
    for worker, name in itertools.product(workers.values(), args.optimizers):
        # A first run also imports modules that JAX and the library load late.
        worker.run(f"trace/{name}/{min(args.weights)}", 1)
    for number in range(args.rounds):
        # Every other round backwards, so that nobody always runs after the same neighbour.
        order = list(workers) if number % 2 == 0 else list(workers)[::-1]
        for (name, weights), package in itertools.product(cases, order):
            found = results[package, name, weights]
            seconds = workers[package].run(f"trace/{name}/{weights}", 1)[0]
            found.trace.append(seconds[clock])
            if weights <= args.compile_up_to and number < args.compile_rounds:
                seconds = workers[package].run(f"compile/{name}/{weights}", 1)[0]
                found.compile.append(seconds[clock])
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return results


def report(results: Results, packages: Sequence[str], args: argparse.Namespace) -> str:
    """A table, with ratios to the first package where there are several."""
    rows = []
    for name, weights, package in itertools.product(args.optimizers, args.weights, packages):
        found = results[package, name, weights]
        trace = harness.Spread.of(found.trace)
        cells = [name, str(weights), f"{trace:.2f}", f"{trace.scaled(1e3 / weights):.1f}"]
        exponent = "—"
        if weights == args.weights[-1] and len(args.weights) > 1:
            fewer = args.weights[-2]
            few = results[package, name, fewer].trace
            found_exponents = exponents(few, found.trace, fewer, weights)
            exponent = f"{harness.Spread.of(found_exponents):.2f}"
        compiling = f"{harness.Spread.of(found.compile):.1f}" if found.compile else "—"
        cells += [exponent, compiling]
        if len(packages) > 1:
            pairs = zip(found.trace, results[packages[0], name, weights].trace, strict=True)
            ratio = harness.Spread.of([ours / first for ours, first in pairs])
            cells[1:1] = [package]
            cells.append(f"{ratio:.2f}" if package != packages[0] else "—")
        rows.append(cells)
    head = ["optimizer", "weights", "trace, s", "trace, ms a weight", "exponent", "compile, s"]
    if len(packages) > 1:
        head[1:1] = ["package"]
        head.append("trace ÷ first package")
    return harness.table(head, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=int, nargs="+", default=[12, 25, 50, 100, 200])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compile-up-to", type=int, default=25, help="weights; 0 to compile nothing (%(default)s)"
    )
    parser.add_argument("--compile-rounds", type=int, default=1, help="rounds that also compile")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="(%(default)s)")
    parser.add_argument(
        "--packages",
        nargs="+",
        default=[str(harness.ROOT)],
        metavar="FOLDER",
        help="folders that a lowrank_optax is in, compared side by side (this one)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write every time measured")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.weights = sorted(set(args.weights))
    if args.serve:
        serve(args.serve, args)
        return
    shared = ["--rank", str(args.rank), "--weights", *map(str, args.weights)]
    shared += ["--optimizers", *args.optimizers]
    workers = {}
    for package in dict.fromkeys(args.packages):
        folder = str(pathlib.Path(package).resolve())
        workers[package] = harness.Worker(harness.command(MODULE, "--serve", folder, *shared))
        imported = pathlib.Path(workers[package].about["package"])
        if imported.parents[1] != pathlib.Path(folder):
            for worker in workers.values():
                worker.close()
            parser.error(f"--packages: there is no lowrank_optax in {package}")
    results = measure(workers, args)
    for worker in workers.values():
        worker.close()
    print(f"rank {args.rank}; medians (quartiles) over {args.rounds} rounds of {args.clock} time")
    print(harness.versions("jax", "jaxlib", "optax"))
    print(report(results, list(workers), args))
    if args.json:
        rows = [
            {"package": package, "optimizer": name, "weights": weights} | dataclasses.asdict(found)
            for (package, name, weights), found in results.items()
        ]
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
