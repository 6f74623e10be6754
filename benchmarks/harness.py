"""What the benchmarks share: timing, turn-taking between processes, and tables.

Times on a shared machine drift by tens of percent within a minute. So contenders take turns,
and what is reported is the ratio of neighbours in time, with its spread over the rounds. Where
other jobs compete for the cores, CPU seconds say more than wall seconds; both are kept.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# The examples are scripts, which import each other from their folder. It comes last, so that
# nothing there can take the place of a module that is found elsewhere.
EXAMPLES = str(ROOT / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    Attributes:
        median: the median.
        low: the first quartile.
        high: the third quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The quartiles of some values."""
        low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    def scaled(self, factor: float) -> "Spread":
        """In other units."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}}–{self.high:{spec}})"


def timed(fn: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call, which must block until its result is there."""
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    return time.perf_counter() - wall, time.process_time() - cpu


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs a benchmark in another process, from the same folder as this one.

    Args:
        module: its name, such as that of ``__spec__``.
        *arguments: its command line.
        python: the interpreter.
    """
    return [python, "-m", module, *arguments]


@contextlib.contextmanager
def turn(path: pathlib.Path | None, alone: bool = False) -> Iterator[None]:
    """Holds a lock while training: beside others, or alone where time is measured.

    Who wants to be alone closes the gate, so that none enters while the others come to an end.

    Args:
        path: where the two lock files are; None for no lock.
        alone: whether nobody may train at the same time.
    """
    if path is None:
        yield
        return
    with path.with_suffix(".gate").open("w") as gate, path.open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def serve(
    tasks: dict[str, Callable[[], object]],
    about: dict[str, object],
    prepare: Callable[[str], object] = lambda task: None,
) -> None:
    """A worker's main loop: says ``about``, then runs tasks by name as it is told.

    Each line of input is ``name times``; each answer is a JSON list of wall and CPU seconds.

    Args:
        tasks: what is timed, by name.
        about: what the worker says of itself.
        prepare: called with the name before each run, and not timed.
    """
    print(json.dumps(about | {"tasks": list(tasks)}), flush=True)
    for line in sys.stdin:
        name, times = line.split()
        found = []
        for _ in range(int(times)):
            prepare(name)
            found.append(timed(tasks[name]))
        print(json.dumps(found), flush=True)


class Worker:
    """A contender in a process of its own, running only while it is asked something."""

    def __init__(self, command: Sequence[str]):
        # Idle OpenMP threads must not spin in the others' turns.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.about = self._answer()

    def _answer(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} died")
        return json.loads(line)

    def run(self, task: str, times: int) -> list[tuple[float, float]]:
        """Wall and CPU seconds of each of ``times`` runs of a task."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {times}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def peak_bytes(compiled: Any) -> int:
    """What the compiler says that a step takes, packing included."""
    sizes = compiled.memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes
        - sizes.alias_size_in_bytes
    )


def versions(*packages: str) -> str:
    """Versions of packages, and the machine, in one line."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"{platform.machine()}, {os.cpu_count()} cores"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
