"""The log of a run."""

import json

from rich.console import Console

from running import reporting


def test_a_resumed_log_drops_what_is_done_again(tmp_path):
    path = tmp_path / "deep" / "adamw.jsonl"
    metrics = {"loss": 1.0, "learning_rate": 0.1, "tokens_per_second": 5.0}
    console = Console(quiet=True)
    with reporting.Reporter("adamw", 0, 9, console, path) as reporter:
        for step in (1, 2, 3, 4):
            reporter.step(step, metrics)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    with reporting.Reporter("adamw", 2, 9, console, path) as reporter:
        reporter.step(3, metrics | {"val_loss": 2.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2] == {"step": 3, **metrics, "val_loss": 2.0}
