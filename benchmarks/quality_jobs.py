"""Which runs ``quality.py`` does, in which order, and what their results amount to.

The order depends on the results alone, so any process at any time knows what comes next.
"""

import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

from contenders import CONTENDERS

SEEDS = (0, 1, 2)
GRID = (1.0, 2.0, 0.5, 4.0, 0.25)
NEIGHBOURS = (1.0, 0.5, 2.0)
MOST_EXTENSIONS = 2
FRACTIONS = {"d/4": 4, "d/8": 8, "d/16": 16}
LEADERS = 6

# Contenders that run at every rank.
EVERY_RANK = (
    "contrib.galore",
    "galore svd keep",
    "flora",
    "lora",
    "galore",
    "random",
    "frozen",
    "fira",
    "sketched",
    "sketched k=2r",
    "apollo",
)
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


def entries() -> list[Entry]:
    """Every contender at every rank, in the order in which they are tuned."""
    rest = [
        (name, fraction)
        for fraction in FRACTIONS
        for name, contender in CONTENDERS.items()
        # What varies one thing is told at one rank.
        if contender.ranked and (fraction == "d/4" or name in EVERY_RANK)
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

    def allowed(entry: Entry) -> bool:
        return not only or any(entry[0] == o or " ".join(entry).strip() == o for o in only)

    for stage in stages:
        chosen = entries() if stage == "small" else leaders(results)
        for entry in filter(allowed, chosen):
            if stage == "regularized" and not CONTENDERS[entry[0]].decays:
                continue
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
