"""The table over seeds is written line by line and goes on where it stopped."""

import json

import jax
import pytest

from benchmarks.checkpoints import rl_seeds

TINY = (
    "--layers 1 --hidden 16 --heads 2 --ffn 24 --supervised-steps 2 --rollouts 16 --minibatches 2 "
    "--iterations 1"
)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Scripts do not ask for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_lines_are_added_once(tmp_path, capsys):
    out = tmp_path / "results" / "rl.jsonl"
    command = ["--tasks", "paths", "--cases", "adamw", "--out", str(out), "--extra", TINY]
    rl_seeds.main([*command, "--seeds", "0"])
    (record,) = (json.loads(line) for line in out.read_text().splitlines())
    assert {"task": "paths", "case": "adamw", "seed": 0}.items() <= record.items()
    assert {"before", "after", "to_0.9", "state_bytes", "wall_s", "cpu_s"} <= record.keys()
    assert record["state_bytes"] > 0
    printed = capsys.readouterr().out
    assert "| adamw" in printed

    with out.open("a") as file:
        file.write('{"task": "paths", "ca')  # a run that was killed while it wrote
    before = out.read_text()
    rl_seeds.main([*command, "--seeds", "0", "1", "--budget-minutes", "0"])
    assert out.read_text() == before
    assert "the budget is spent" in capsys.readouterr().out


def test_unknown_cases_name_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        rl_seeds.main(["--tasks", "paths", "--cases", "sgd"])
    message = capsys.readouterr().err
    assert "'sgd' is none of" in message
    assert "'adamw'" in message


def test_every_case_is_a_command_line():
    for task, cases in rl_seeds.CASES.items():
        for options in cases.values():
            experiment = rl_seeds.prepare(task, 0, options, [])
            assert len(experiment.args.optimizer) == 1
