"""What a basis refresh costs, and how much of the gradient its basis captures, by method.

  python -m benchmarks.speed.refresh                      # synthetic spectra, 512² to 2048²
  python -m benchmarks.speed.refresh --sizes 512 --sweep  # other numbers of iterations and jitters
  python -m benchmarks.speed.refresh --real 512           # gradients of a decoder in training

A basis is judged by its energy ‖PᵀG‖² relative to the best that rank r can do, Σσᵢ² over the r
largest singular values. Warm starts begin from the singular vectors of an earlier gradient,
whose subspaces have since turned.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowrank_optax as lro
from benchmarks import harness, plain_decoder
from lowrank_optax._bases import find as methods

Basis = jax.Array
REDUCTION = "reduction"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two gradients of one weight, an interval apart, smaller side first.

    Attributes:
        name: for tables.
        new: the gradient now.
        old_vectors: singular vectors of the gradient at the last refresh, largest first.
        values: singular values of the gradient now, largest first.
    """

    name: str
    new: np.ndarray
    old_vectors: np.ndarray
    values: np.ndarray

    def best(self, rank: int) -> float:
        """The most energy that a basis of this rank can capture."""
        return float(np.sum(self.values[:rank] ** 2))


def synthetic_pair(size: int, decay: float, turn: float, seed: int = 0) -> Pair:
    """Singular values ``i ** -decay``, whose vectors turn by about ``turn`` radians."""
    rng = np.random.default_rng(seed)
    values = np.arange(1, size + 1) ** -decay

    def frame(matrix: np.ndarray) -> np.ndarray:
        return np.linalg.qr(matrix)[0]

    def normal() -> np.ndarray:
        return rng.standard_normal((size, size), np.float32)

    old = frame(normal())
    new = frame(np.cos(turn) * old + np.sin(turn) * normal() / size**0.5)
    gradient = (new * values.astype(np.float32)) @ frame(normal()).T
    return Pair(f"{size}², σ ∝ 1/i^{decay:g}, turned {turn:g}", gradient, old, values)


def real_pairs(width: int, steps: tuple[int, int] = (50, 250)) -> list[Pair]:
    """Gradients of one decoder at two steps of its training by AdamW, on source code."""
    size = plain_decoder.Size(width, 2 * width, layers=2, vocabulary=256, batch=8, length=128)
    params = jax.tree.map(jnp.asarray, plain_decoder.init(size))
    tx = optax.adamw(optax.linear_schedule(0.0, 1e-3, 20))
    state = tx.init(params)
    tokens = plain_decoder.batches(size, steps[1] + 1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        grads = jax.grad(plain_decoder.loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    gradient = jax.jit(
        jax.grad(lambda blocks, rest, t: plain_decoder.loss(rest | {"blocks": blocks}, t))
    )
    kept = []
    for turn, batch in enumerate(tokens):
        if turn in steps:
            kept.append(jax.device_get(gradient(params["blocks"], params, batch)))
        params, state = step(params, state, batch)
    pairs = []
    for layer, name in ((0, "q"), (1, "v"), (0, "o"), (1, "up"), (0, "down")):
        old, new = (grads[layer][name] for grads in kept)
        if old.shape[0] > old.shape[1]:
            old, new = old.T, new.T
        shape = "×".join(map(str, new.shape))
        vectors = np.linalg.svd(old, full_matrices=False)[0]
        values = np.linalg.svd(new, compute_uv=False).astype(np.float64)
        pairs.append(Pair(f"{shape}, layer {layer} {name}", new, vectors, values))
    return pairs


def matrix_view(shape: tuple[int, ...]) -> lro.View:
    """A weight read as one matrix."""
    return lro.View(shape, batch_axes=(), reduction_axes=(0,), output_axes=(1,))


def make_methods(shape: tuple[int, int], rank: int) -> dict[str, tuple[bool, functools.partial]]:
    """By name: whether the start is the old basis, and ``(gradient, start, key) -> basis``."""
    view = matrix_view(shape)

    def refresh(gradient, start, key, *, method, first):
        return methods.new_basis(method, gradient, view, REDUCTION, start, key, jnp.asarray(first))

    return {
        "subspace, cold": (False, functools.partial(refresh, method="subspace", first=True)),
        "subspace, warm": (True, functools.partial(refresh, method="subspace", first=False)),
        "random": (False, functools.partial(refresh, method="random", first=False)),
        "gram": (False, functools.partial(refresh, method="gram", first=False)),
        "svd": (False, functools.partial(refresh, method="svd", first=False)),
    }


def energy(basis: Basis, gradient: np.ndarray) -> float:
    """‖PᵀG‖², in float64."""
    return float(np.sum((np.asarray(basis, np.float64).T @ gradient.astype(np.float64)) ** 2))


@dataclasses.dataclass
class Result:
    """What one method did on one pair.

    Attributes:
        compile_s: seconds to compile.
        energy: captured, relative to the best of this rank.
        wall_s: wall seconds of each run.
        cpu_s: CPU seconds of each run.
    """

    compile_s: float
    energy: float = 0.0
    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)

    def seconds(self, clock: str) -> harness.Spread:
        """Quartiles over the runs, by either clock."""
        return harness.Spread.of(self.wall_s if clock == "wall" else self.cpu_s)


def compare(pair: Pair, rank: int, rounds: int, slow_rounds: int) -> dict[str, Result]:
    """Times all methods in turns; those that cost seconds only ``slow_rounds`` times."""
    shape, key = pair.new.shape, jax.random.key(1)
    random = methods.random_basis(
        jax.random.key(0), matrix_view(shape), REDUCTION, rank, jnp.dtype(jnp.float32)
    )
    gradient, warm_start = jnp.asarray(pair.new), jnp.asarray(pair.old_vectors[:, :rank])
    results, runs = {}, {}
    for name, (warm, fn) in make_methods(shape, rank).items():
        start = warm_start if warm else random
        began = time.perf_counter()
        compiled = jax.jit(fn).lower(gradient, start, key).compile()
        results[name] = Result(time.perf_counter() - began)
        runs[name] = functools.partial(compiled, gradient, start, key)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            slow = name in ("svd", "gram")
            if slow and turn >= slow_rounds:
                continue
            outputs = []
            wall, cpu = harness.timed(
                lambda run=run, outputs=outputs: outputs.append(jax.block_until_ready(run()))
            )
            results[name].energy = energy(outputs[0], pair.new) / pair.best(rank)
            if slow or turn > 0:  # a first run of milliseconds also warms caches
                results[name].wall_s.append(wall)
                results[name].cpu_s.append(cpu)
    return results


def print_comparison(pair: Pair, rank: int, results: dict[str, Result]) -> None:
    slowest = {clock: results["svd"].seconds(clock).median for clock in ("wall", "cpu")}
    rows = []
    for name, result in results.items():
        wall, cpu = result.seconds("wall"), result.seconds("cpu")
        rows.append(
            [
                name,
                f"{wall.scaled(1e3):.0f}",
                f"{slowest['wall'] / wall.median:.1f}×",
                f"{cpu.scaled(1e3):.0f}",
                f"{slowest['cpu'] / cpu.median:.1f}×",
                f"{result.energy:.4f}",
                f"{result.compile_s:.1f}",
            ]
        )
    print(f"\n{pair.name}, rank {rank}")
    faster = "svd ÷ this"
    head = ("method", "wall, ms", faster, "CPU, ms", faster, "energy ÷ best", "compile, s")
    print(harness.table(head, rows), flush=True)


def sweep(pair: Pair, rank: int) -> list[dict]:
    """Energy by number of iterations and jitter, from a cold and from a warm start."""
    view = matrix_view(pair.new.shape)
    gradient = jnp.asarray(pair.new)
    draw = functools.partial(
        methods.random_directions, view=view, side=REDUCTION, rank=rank, dtype=jnp.float32
    )
    noise, random = draw(jax.random.key(1)), draw(jax.random.key(0))
    records = []
    chosen = methods.START_JITTER
    for jitter in (0.0, 0.01, 0.03, 0.1, 0.3):
        methods.START_JITTER = jitter
        run = jax.jit(lambda *a: methods.subspace_iteration(a[0], view, REDUCTION, *a[1:]))
        for start_name, start in (
            ("warm", jnp.asarray(pair.old_vectors[:, :rank])),
            ("cold", random),
        ):
            if start_name == "cold" and jitter != chosen:
                continue
            for iterations in range(1, 7 if start_name == "cold" else 4):
                basis = run(gradient, start, noise, iterations)
                records.append(
                    {
                        "pair": pair.name,
                        "rank": rank,
                        "start": start_name,
                        "jitter": jitter,
                        "iterations": iterations,
                        "energy": energy(basis, pair.new) / pair.best(rank),
                    }
                )
    methods.START_JITTER = chosen
    return records


def print_sweep(pair: Pair, rank: int, records: list[dict]) -> None:
    rows: dict[tuple, list[str]] = {}
    for record in records:
        key = record["start"], f"{record['jitter']:g}"
        rows.setdefault(key, []).append(f"{record['energy']:.4f}")
    most = max(map(len, rows.values()))
    cells = [[*key, *row, *[""] * (most - len(row))] for key, row in rows.items()]
    share = pair.best(rank) / pair.best(len(pair.values))
    print(f"\n{pair.name}, rank {rank}: energy ÷ best (best is {share:.3f} of the gradient's)")
    print(harness.table(("start", "jitter", *(f"{i + 1} it." for i in range(most))), cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 1024, 2048])
    parser.add_argument("--ranks", nargs="*", default=["128", "0.25"], help="columns or fractions")
    parser.add_argument("--decay", type=float, nargs="*", default=[0.8])
    parser.add_argument("--turn", type=float, nargs="*", default=[0.3])
    parser.add_argument("--real", type=int, help="width of a decoder to train for gradients")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds that run svd and gram")
    parser.add_argument("--sweep", action="store_true", help="vary iterations; no timing")
    parser.add_argument("--json", type=pathlib.Path, help="where to write every number")
    args = parser.parse_args()
    print(harness.versions("jax", "jaxlib", "lowrank-optax"))
    if args.real:
        pairs = real_pairs(args.real)
    else:
        pairs = [
            synthetic_pair(size, decay, turn)
            for size in args.sizes
            for decay in args.decay
            for turn in args.turn
        ]
    records = []
    for pair in pairs:
        side = pair.new.shape[0]
        for rank in sorted({int(r) if float(r) > 1 else int(float(r) * side) for r in args.ranks}):
            if args.sweep:
                found = sweep(pair, rank)
                print_sweep(pair, rank, found)
                records += found
                continue
            results = compare(pair, rank, args.rounds, args.slow_rounds)
            print_comparison(pair, rank, results)
            records += [
                {"pair": pair.name, "rank": rank, "method": name} | dataclasses.asdict(result)
                for name, result in results.items()
            ]
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
