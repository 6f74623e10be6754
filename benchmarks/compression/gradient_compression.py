"""Ways to spend fewer bytes on an optimizer, side by side on one language model.

  python -m benchmarks.compression.gradient_compression --out compression.jsonl
  python -m benchmarks.compression.gradient_compression --out compression.jsonl --report

A run that was stopped goes on where it was.

Task: the byte-level decoder of ``examples/`` on the source text of Python's standard library.
Each method first runs over a few learning rates with a seed of its own, and then with the
best over the seeds that are reported. Every finished run is one JSON line.

Columns: bytes of optimizer state; peak bytes of a compiled train step (arguments, results and
temporaries, less what is donated); validation loss, mean ± standard error over the seeds;
step time over Adam's, the median of rounds in which all take turns; and what the compression
loses, over all parameters, as the mean of every 20th step: the distortion ‖G − G̃‖/‖G‖ and the
cosine of G̃, the gradient that the optimizer behind the compression sees, and G. Of FP8
moments it is those of the stored first moment and the exact one, since that is what they round.
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
from typing import Any

from benchmarks import harness
from benchmarks.compression import training
from benchmarks.compression.methods import methods
from benchmarks.compression.task import Size

RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
TUNING_SEED = 1000


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
                functools.partial(training.run, name, rate, TUNING_SEED, size),
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
                functools.partial(training.run, name, best["rate"], seed, size),
                kind="run",
                method=name,
                rate=best["rate"],
                seed=seed,
                **about,
            )
    if not all(any(results.of("time", name, size)) for name in names):
        seconds = training.time_steps(names, rounds, size)
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
