"""What a run shows while it trains, what it logs, and the table at the end."""

import json
import pathlib
from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from running.training import Result


class Reporter:
    """Shows progress on a terminal, prints validations anywhere, and logs every step as JSON.

    Args:
        name: of the run.
        start: how many updates were done before.
        steps: how many there will be.
        console: where to print.
        log: a file for one JSON object a line, or ``None``. Lines of an earlier run after
            ``start`` are dropped: those steps are done again.

    Attributes:
        validated: the metric that is there at a validation only, and lets a line be printed.
        label: what it is called there.
    """

    validated, label = "val_loss", "val"

    def __init__(
        self, name: str, start: int, steps: int, console: Console, log: pathlib.Path | None = None
    ):
        self._name, self._start, self._steps = name, start, steps
        self._console = console
        self._log = None if log is None else _open_log(log, start)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(
            name, total=steps, completed=start, measured="compiling"
        )

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._log is not None:
            self._log.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes in what was measured at one step."""
        shown = self.describe(metrics)
        self._progress.update(self._task, completed=step, measured=shown)
        if self._log is not None:
            print(json.dumps({"step": step, **metrics}), file=self._log, flush=True)
        if self.validated in metrics:
            self.say(step, f"{shown}  {self.label} {metrics[self.validated]:.4f}")

    def describe(self, metrics: Mapping[str, float]) -> str:
        """What of the metrics is shown at every step."""
        return (
            f"loss {metrics['loss']:.3f}  lr {metrics['learning_rate']:.1e}  "
            f"{metrics['tokens_per_second']:,.0f} tokens/s"
        )

    def say(self, step: int, text: str) -> None:
        """Prints a line, whether or not this is a terminal."""
        line = f"{self._name:>8}  step {step:>5}  {text}"
        self._console.print(line, highlight=False, soft_wrap=True)


def _open_log(path: pathlib.Path, start: int) -> IO[str]:
    kept = []
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= start]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # the half-written end of a run that was killed


def print_results(console: Console, results: Mapping[str, Result], adamw_bytes: int) -> None:
    """Prints the table that the runs were for.

    Args:
        console: where to.
        results: by optimizer.
        adamw_bytes: what AdamW's state for the same parameters holds, whether or not it ran.
    """
    table = Table()
    table.add_column("optimizer")
    for heading in ("val loss (nats/byte)", "state bytes", "of AdamW's", "median step"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        seconds = result.step_seconds
        table.add_row(
            name,
            f"{result.val_loss:.4f}",
            f"{result.state_bytes:,}",
            f"{result.state_bytes / adamw_bytes:.1%}",
            "–" if seconds is None else f"{1000 * seconds:.0f} ms",
        )
    console.print(table)
