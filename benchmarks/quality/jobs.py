"""Which runs ``quality.py`` does, in which order, and what their results amount to.

The order depends on the results alone, so any process at any time knows what comes next.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.quality.contenders import CONTENDERS

SEEDS = (0, 1, 2)
# Learning rates over the contender's own, and over the best of the small stage.
GRID = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NEIGHBOURS = (0.5, 1.0, 2.0)
MOST_EXTENSIONS = 2
FRACTIONS = {"d/4": 4, "d/8": 8, "d/16": 16}
BEST = 3

# Contenders that run at every rank.
EVERY_RANK = (
    "contrib.galore",
    "flora",
    "lora",
    "galore",
    "galore scale=0.25",
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


# What the later stages run in any case, beside the `BEST` of the small one.
FINALISTS = (
    ("adamw", ""),
    ("adamw rest×4", ""),
    ("sketched", "d/4"),
    ("fira random", "d/4"),
    ("galore", "d/4"),
    ("contrib.galore", "d/4"),
    ("fira", "d/4"),
    ("sketched", "d/8"),
    ("sketched subspace", "d/4"),
    ("muon", ""),
    ("apollo", "d/4"),
)

# What the stage of step times runs.
TIMED = (
    ("adamw", ""),
    ("lowrank_adamw", "d/4"),
    ("galore", "d/4"),
    ("random", "d/4"),
    ("sketched", "d/4"),
    ("sketched k=2r", "d/4"),
    ("contrib.galore", "d/4"),
    ("fira random", "d/4"),
    ("fira", "d/4"),
    ("apollo", "d/4"),
    ("muon", ""),
    ("lora", "d/4"),
)

Entry = tuple[str, str]
Results = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """Training runs that differ in rate and seed alone.

    Attributes:
        stage: a key of `tasks`.
        name: a contender.
        fraction: of the width that its rank is, or "".
        lanes: peak learning rate and seed of each run.
    """

    stage: str
    name: str
    fraction: str
    lanes: tuple[tuple[float, int], ...]

    @property
    def key(self) -> str:
        """What identifies it among the jobs of one state of the results."""
        return key_of(self.stage, (self.name, self.fraction), *self.lanes[0])


def key_of(stage: str, entry: Entry, rate: float, seed: int) -> str:
    """What identifies one training run in a file of results."""
    return f"{stage}|{entry[0]}|{entry[1]}|{rate:.6g}|{seed}"


def entries() -> list[Entry]:
    """Every contender at every rank, in the order in which they are tuned."""
    rest = [
        (name, fraction)
        for fraction in FRACTIONS
        for name, contender in CONTENDERS.items()
        # What varies one thing is told at one rank.
        if contender.ranked and (fraction == "d/4" or name in EVERY_RANK)
    ]
    unranked = [(name, "") for name, contender in CONTENDERS.items() if not contender.ranked]
    return list(dict.fromkeys([*FIRST, *unranked, *rest]))


def _losses(results: Results, stage: str, entry: Entry) -> dict[float, dict[int, float]]:
    """Validation losses by rate and seed, infinite where a run diverged."""
    found: dict[float, dict[int, float]] = {}
    for row in results.values():
        if (row["stage"], row["name"], row["fraction"]) == (stage, *entry):
            loss = float("inf") if row["val_loss"] is None else row["val_loss"]
            found.setdefault(row["rate"], {})[row["seed"]] = loss
    return found


def _means(
    results: Results, stage: str, entry: Entry, seeds: tuple[int, ...] = SEEDS
) -> dict[float, float]:
    """Mean loss over some seeds of each rate that all of them have run."""
    return {
        rate: statistics.fmean(by_seed[seed] for seed in seeds)
        for rate, by_seed in _losses(results, stage, entry).items()
        if by_seed.keys() >= set(seeds)
    }


def best_rate(
    results: Results, stage: str, entry: Entry, seeds: tuple[int, ...] = SEEDS
) -> float | None:
    """The rate with the lowest mean loss over some seeds, None before there is one."""
    finite = {r: m for r, m in _means(results, stage, entry, seeds).items() if m < float("inf")}
    return min(finite, key=lambda rate: finite[rate]) if finite else None


def _next_rates(
    results: Results, stage: str, entry: Entry, grid: list[float], seeds: tuple[int, ...]
) -> list[float]:
    """Rates to try: the grid, then further where the best of it is at an end."""
    means = _means(results, stage, entry, seeds)
    done = {f"{rate:.6g}" for rate in means}
    missing = [rate for rate in grid if f"{rate:.6g}" not in done]
    if missing:
        return missing
    if len(means) >= len(grid) + MOST_EXTENSIONS:
        return []
    best = min(means, key=lambda rate: means[rate])
    if best >= max(means):
        return [2 * best]
    if best <= min(means):
        return [best / 2]
    return []


def leaders(results: Results) -> list[Entry]:
    """The `FINALISTS` and the entries with the lowest loss of the small stage."""
    losses = {entry: summary(results, "small", entry) for entry in entries()}
    ranked = sorted((s.mean, entry) for entry, s in losses.items() if s is not None)
    others = [entry for _, entry in ranked if entry not in FINALISTS]
    return [*FINALISTS, *others[:BEST]]


def pending(
    results: Results,
    stages: dict[str, Any],
    only: list[str],
    tuned: Results | None = None,
    tuning_seeds: tuple[int, ...] = SEEDS,
) -> Iterator[Job]:
    """Jobs that have not run, in order. The order depends on the results alone.

    Args:
        results: what has run.
        stages: which to run.
        only: names of contenders, alone or with their fraction; all if empty.
        tuned: results of another machine, whose best rates of the small stage are the middle of
            this one's grids where its own small stage tells none.
        tuning_seeds: with which the rate is chosen; the other seeds run at the best one alone.
    """

    def allowed(entry: Entry) -> bool:
        return not only or any(entry[0] == o or " ".join(entry).strip() == o for o in only)

    for stage in stages:
        if stage == "time":
            for entry in filter(allowed, TIMED):
                rate = CONTENDERS[entry[0]].rate
                if key_of(stage, entry, rate, SEEDS[0]) not in results:
                    yield Job(stage, *entry, ((rate, SEEDS[0]),))
            continue
        chosen = entries() if stage == "small" else leaders(results if tuned is None else tuned)
        for entry in filter(allowed, chosen):
            contender = CONTENDERS[entry[0]]
            if stage == "regularized" and not contender.decays:
                continue
            found = None if stage == "small" else best_rate(results, "small", entry)
            if found is None and tuned is not None:
                found = best_rate(tuned, "small", entry)
            if found is None and stage != "small":
                continue
            base, factors = (contender.rate, GRID) if found is None else (found, NEIGHBOURS)
            grid, seeds = [base * factor for factor in factors], tuning_seeds
            rates = _next_rates(results, stage, entry, grid, seeds)
            if not rates and (best := best_rate(results, stage, entry, seeds)) is not None:
                rates, seeds = [best], SEEDS
            lanes = tuple(
                (rate, seed)
                for rate in rates
                for seed in seeds
                if key_of(stage, entry, rate, seed) not in results
            )
            if lanes:
                yield Job(stage, *entry, lanes)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the seeds of one entry amount to.

    Attributes:
        mean: mean validation loss, nats a byte.
        error: its standard error.
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
    by_rate = _losses(results, stage, entry)
    losses = list(by_rate[rate].values())
    row = results[key_of(stage, entry, rate, SEEDS[0])]
    return Summary(
        mean=statistics.fmean(losses),
        error=statistics.stdev(losses) / len(losses) ** 0.5,
        seeds=len(losses),
        rate=rate,
        at_end=rate in (min(by_rate), max(by_rate)),
        state=row["state_bytes"] / row["adamw_bytes"],
        row=row,
    )


def step_times(results: Results) -> dict[Entry, float]:
    """CPU time of a step over AdamW's, refreshes included, for entries that were timed."""
    times = {
        (row["name"], row["fraction"]): row["step_cpu_ms"]
        for row in results.values()
        if row["stage"] == "time"
    }
    yardstick = times.get(("adamw", ""))
    return {entry: time / yardstick for entry, time in times.items()} if yardstick else {}


def load(path: pathlib.Path) -> Results:
    """Every result in a file, by its key."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["key"]: row for row in rows}
