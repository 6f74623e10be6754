"""Validation loss of many optimizers on byte-level language modelling, each at its best rate.

Every contender's learning rate is tuned over a grid of the same size with one seed, then three
seeds run at the best rate. Results are appended to a file of JSON lines, and what is in it is not
run again: the benchmark can be stopped at any time, run in pieces, and by several processes.

  python benchmarks/quality.py run --budget-minutes 60 --threads 1
  python benchmarks/quality.py run --only sketched --only adamw
  python benchmarks/quality.py plan
  python benchmarks/quality.py report --plot benchmarks/quality.png

Jobs come in a fixed order, the most telling first. Stages:

- ``small``: width 128, 4 layers, 400 steps of 8 × 128 bytes of the standard library's source; a
  grid of five rates in steps of 2, up to two more where the best is at an end, then three seeds;
- ``long``: the same for 1600 steps; ``large``: width 256, 6 layers; ``regularized``: with clipping
  at 1 and weight decay 0.1; for the leading contenders of ``small`` and AdamW, at the best rate
  there and at half and twice that;
- ``english``: the text of a dictionary, likewise. It comes from a Debian package:

    apt-get download dict-gcide && dpkg-deb -x dict-gcide_*.deb gcide
    zcat gcide/usr/share/dictd/gcide.dict.dz | head -c 24000000 | tail -c 4000000 > english.txt
    python benchmarks/quality.py run --english english.txt
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
GRID = (1.0, 2.0, 0.5, 4.0, 0.25)
NEIGHBOURS = (1.0, 0.5, 2.0)
MOST_EXTENSIONS = 2
FRACTIONS = {"d/4": 4, "d/8": 8, "d/16": 16}
LEADERS = 6

# Of contenders with a rank, at which; the most telling first.
FIRST = (
    ("adamw", ""),
    ("galore", "d/4"),
    ("sketched", "d/4"),
    ("fira", "d/4"),
    ("contrib.galore", "d/4"),
    ("sketched", "d/8"),
    ("galore svd keep", "d/4"),
    ("random", "d/4"),
    ("apollo", "d/4"),
    ("apollo-mini", ""),
    ("muon", ""),
    ("adafactor", ""),
    ("lora", "d/4"),
    ("flora", "d/4"),
    ("sketched subspace", "d/4"),
    ("sketched a=2", "d/4"),
    ("sketched a=0.5", "d/4"),
    ("sketched k=r/4", "d/4"),
    ("sketched k=2r", "d/4"),
    ("fira random", "d/4"),
    ("sketched every=10", "d/4"),
    ("sketched every=200", "d/4"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        stage: a key of `tasks`.
        name: a contender.
        fraction: of the width that its rank is, or "".
        rate: its peak learning rate.
        seed: the seed.
    """

    stage: str
    name: str
    fraction: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """What identifies it in a file of results."""
        return f"{self.stage}|{self.name}|{self.fraction}|{self.rate:.6g}|{self.seed}"


Entry = tuple[str, str]
Results = dict[str, dict[str, Any]]


def tasks(args: argparse.Namespace) -> dict[str, Any]:
    """The stages that can run."""
    from contenders import Task

    small = Task(**args.task)
    changed = dataclasses.replace
    found = {
        "small": small,
        "long": changed(small, steps=4 * small.steps),
        "large": changed(small, width=2 * small.width, layers=small.layers * 3 // 2),
        "regularized": changed(small, clip=1.0, decay=0.1),
    }
    if args.english:
        found["english"] = changed(small, corpus=args.english)
    return found


def entries() -> list[Entry]:
    """Every contender at every rank, in the order in which they are tuned."""
    from contenders import CONTENDERS

    rest = [
        (name, fraction)
        for fraction in FRACTIONS
        for name, contender in CONTENDERS.items()
        if contender.ranked
    ]
    return list(dict.fromkeys([*FIRST, *rest]))


def value_of(results: Results, job: Job) -> float | None:
    """The validation loss of a job, infinite if it diverged, None if it has not run."""
    row = results.get(job.key)
    if row is None:
        return None
    return float("inf") if row["val_loss"] is None else row["val_loss"]


def _next_rates(tried: dict[float, float], factors: tuple[float, ...], base: float) -> list[float]:
    """Rates to try: the grid, then further where the best of it is at an end."""
    grid = [base * factor for factor in factors]
    missing = [rate for rate in grid if f"{rate:.6g}" not in {f"{r:.6g}" for r in tried}]
    if missing:
        return missing
    if len(tried) >= len(grid) + MOST_EXTENSIONS:
        return []
    best = min(tried, key=lambda rate: tried[rate])
    if best >= max(tried):
        return [2 * best]
    if best <= min(tried):
        return [best / 2]
    return []


def _tried(results: Results, stage: str, entry: Entry, seed: int) -> dict[float, float]:
    rates = [
        row["rate"]
        for row in results.values()
        if (row["stage"], row["name"], row["fraction"], row["seed"]) == (stage, *entry, seed)
    ]
    jobs = {rate: Job(stage, *entry, rate, seed) for rate in rates}
    return {rate: value_of(results, job) or 0.0 for rate, job in jobs.items()}


def best_rate(results: Results, stage: str, entry: Entry) -> float | None:
    """The rate with the lowest loss of seed 0, None before there is one."""
    tried = _tried(results, stage, entry, SEEDS[0])
    finite = {rate: loss for rate, loss in tried.items() if loss != float("inf")}
    return min(finite, key=lambda rate: finite[rate]) if finite else None


def leaders(results: Results) -> list[Entry]:
    """AdamW and the contenders with the lowest loss of the small stage, one rank of each."""
    losses = {entry: summary(results, "small", entry) for entry in entries()}
    ranked = sorted((s.mean, entry) for entry, s in losses.items() if s is not None)
    chosen: dict[str, Entry] = {"adamw": ("adamw", "")}
    for _, entry in ranked:
        if len(chosen) <= LEADERS:
            chosen.setdefault(entry[0], entry)
    return list(chosen.values())


def pending(
    results: Results, stages: dict[str, Any], only: list[str], running: set[str]
) -> Iterator[Job]:
    """Jobs that have not run, in order. The order depends on the results alone."""
    from contenders import CONTENDERS

    def allowed(entry: Entry) -> bool:
        return not only or any(entry[0] == o or " ".join(entry).strip() == o for o in only)

    for stage in stages:
        chosen = entries() if stage == "small" else leaders(results)
        for entry in filter(allowed, chosen):
            base, factors = CONTENDERS[entry[0]].rate, GRID
            if stage != "small":
                found = best_rate(results, "small", entry)
                if found is None:
                    continue
                base, factors = found, NEIGHBOURS
            tried = _tried(results, stage, entry, SEEDS[0])
            rates = _next_rates(tried, factors, base)
            tuning = [Job(stage, *entry, rate, SEEDS[0]) for rate in rates]
            yield from (job for job in tuning if job.key not in running)
            if tuning:
                continue
            rate = best_rate(results, stage, entry)
            seeds = [] if rate is None else [Job(stage, *entry, rate, s) for s in SEEDS]
            yield from (j for j in seeds if j.key not in results and j.key not in running)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the seeds of one entry amount to.

    Attributes:
        mean: mean validation loss, nats a byte.
        error: its standard error; 0 for one seed.
        seeds: how many.
        rate: the learning rate.
        at_end: whether that is at an end of what was tried.
        state: bytes of optimizer state over AdamW's.
        row: one of the results.
    """

    mean: float
    error: float
    seeds: int
    rate: float
    at_end: bool
    state: float
    row: dict[str, Any]


def summary(results: Results, stage: str, entry: Entry) -> Summary | None:
    """The seeds at the best rate, None if nothing has run or all diverged."""
    rate = best_rate(results, stage, entry)
    if rate is None:
        return None
    rows = [results.get(Job(stage, *entry, rate, seed).key) for seed in SEEDS]
    found = [row for row in rows if row is not None]
    losses = [float("inf") if r["val_loss"] is None else r["val_loss"] for r in found]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    tried = _tried(results, stage, entry, SEEDS[0])
    row = found[0]
    return Summary(
        mean=statistics.fmean(losses),
        error=error,
        seeds=len(losses),
        rate=rate,
        at_end=rate in (min(tried), max(tried)),
        state=row["state_bytes"] / row["adamw_bytes"],
        row=row,
    )


def load(path: pathlib.Path) -> Results:
    """Every result in a file, by its key."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["key"]: row for row in rows}


class Claims:
    """Which jobs other processes are running: one file a job, with the process's number."""

    def __init__(self, results: pathlib.Path):
        self._folder = results.with_suffix(".running")

    def _path(self, job: Job) -> pathlib.Path:
        return self._folder / "".join(c if c.isalnum() or c in "=.-" else "_" for c in job.key)

    def take(self, job: Job) -> bool:
        """Claims a job, unless a process that lives has."""
        self._folder.mkdir(exist_ok=True, parents=True)
        path = self._path(job)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            text = path.read_text().strip()
            if text and _alive(int(text)):
                return False
            path.unlink(missing_ok=True)  # Its process was killed.
            return self.take(job)
        with os.fdopen(handle, "w") as file:
            file.write(str(os.getpid()))
        return True

    def drop(self, job: Job) -> None:
        """Gives a job back, done or not."""
        self._path(job).unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def run(args: argparse.Namespace) -> None:
    """Runs pending jobs until none is left or the time is up."""
    if args.threads == 1:
        # Read when JAX starts, which must not have happened yet.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        os.environ["OMP_NUM_THREADS"] = "1"
        if args.core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {args.core})
    import contenders
    import harness

    stages = {n: t for n, t in tasks(args).items() if not args.stage or n in args.stage}
    claims, deadline = Claims(args.results), time.monotonic() + 60 * args.budget_minutes
    longest = 0.0
    while time.monotonic() + longest < deadline:
        results, taken = load(args.results), set()
        while True:
            job = next(pending(results, stages, args.only, taken), None)
            if job is None or claims.take(job):
                break
            taken.add(job.key)
        if job is None:
            print("nothing left to start")
            return
        # Another process may have finished it since.
        if job.key in load(args.results):
            claims.drop(job)
            continue
        task, began = stages[job.stage], time.monotonic()
        rank = task.width // FRACTIONS[job.fraction] if job.fraction else 0
        try:
            result = contenders.run(job.name, task, rank, job.rate, job.seed)
            row = {"key": job.key} | dataclasses.asdict(job) | result
            row |= {
                "task": dataclasses.asdict(task) | {"corpus": pathlib.Path(task.corpus).name},
                "threads": args.threads,
                "load": os.getloadavg()[0],
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "on": harness.versions("jax", "optax"),
            }
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        finally:
            claims.drop(job)
        longest = max(longest, time.monotonic() - began)
        loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        print(f"{job.key}: {loss}, {row['seconds']:.0f} s", flush=True)


def plan(args: argparse.Namespace) -> None:
    """Prints what would run next, as far as it is known."""
    results = load(args.results)
    jobs = list(pending(results, tasks(args), args.only, set()))
    print(f"{len(results)} runs are done; known to follow: {len(jobs)}")
    for job in jobs:
        print(job.key)


def report(args: argparse.Namespace) -> None:
    """Prints a table for each stage and draws the plot."""
    import quality_report

    results = load(args.results)
    stages = ("small", "long", "large", "regularized", "english")
    found = {
        stage: {e: s for e in entries() if (s := summary(results, stage, e)) is not None}
        for stage in stages
    }
    for stage, rows in found.items():
        if rows:
            print(f"## {stage}\n\n{quality_report.stage_table(rows)}\n")
    if args.plot:
        quality_report.draw(found["small"], args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "plan", "report"])
    parser.add_argument(
        "--results", type=pathlib.Path, default=HERE / "quality.jsonl", help="file of JSON lines"
    )
    parser.add_argument("--only", action="append", default=[], help="a contender; may be repeated")
    parser.add_argument("--stage", action="append", default=[], help="a stage; may be repeated")
    parser.add_argument(
        "--budget-minutes", type=float, default=1e6, help="start no job that ends later"
    )
    parser.add_argument("--threads", type=int, choices=[0, 1], default=0, help="1 for one thread")
    parser.add_argument("--core", type=int, help="with --threads 1, the core to stay on")
    parser.add_argument("--english", default="", help="file with the English text")
    parser.add_argument(
        "--task", type=json.loads, default={}, help='changes of the small task, {"steps": 20}'
    )
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw the plot")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    {"run": run, "plan": plan, "report": report}[args.command](args)


if __name__ == "__main__":
    main()
