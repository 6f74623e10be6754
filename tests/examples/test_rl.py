"""Reinforcement learning end to end: rewards rise, runs resume, options are checked."""

import argparse
import io
import json
import os
import pathlib
import shlex
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import rl
from reinforcement.experiment import prepare, supervise
from reinforcement.options import make_parser
from reinforcement.reporting import RewardReporter

SMALL = shlex.split(
    "--layers 2 --hidden 48 --heads 2 --ffn 96 --supervised-steps 200 --rollouts 128 "
    "--minibatches 4 --iterations 24 --eval-every 24 --optimizer galore adamw"
)
TINY = shlex.split(
    "--layers 1 --hidden 24 --heads 2 --ffn 32 --supervised-steps 200 --rollouts 64 --minibatches 2"
)


pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")


def parse(*options: str) -> argparse.Namespace:
    return make_parser(None).parse_args(list(options))


def lines(directory: pathlib.Path, name: str) -> list[dict[str, float]]:
    found = (directory / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in found]


@pytest.fixture(scope="module")
def reference():
    """What supervised training on random walks leads to: about half of the possible reward."""
    experiment = prepare(parse(*SMALL))
    return supervise(experiment, None, Console(file=io.StringIO()))


@pytest.fixture
def improve(reference, tmp_path):
    """Runs reinforcement learning: the result, each iteration's metrics, what was printed."""

    def run(name: str, *options: str):
        log = tmp_path / str(len(list(tmp_path.iterdir())))
        experiment = prepare(parse(*SMALL, *options, "--log-dir", str(log)))
        printed = io.StringIO()
        result = rl.run_one(experiment, name, reference, None, Console(file=printed))
        return result, lines(log, name), printed.getvalue()

    return run


def test_paths_become_shorter_under_ppo_and_galore(improve):
    watched = ["--monitor-every", "6", "--min-snr", "99"]
    result, found, printed = improve("galore", "--rank", "12", "--lr", "2e-3", *watched)
    rewards = [line["reward"] for line in found]
    assert 0.3 < np.mean(rewards[:2]) < 0.55
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.12
    assert result.after > result.before + 0.08
    assert found[-1]["length"] < found[0]["length"]
    assert result.restores == 0
    # The monitor looked at the iterations that it was asked to look at.
    assert "step 6: params" not in printed
    assert "step 6: " in printed
    assert "effective_snr is" in printed
    assert "step 7: " not in printed


@pytest.mark.slow
def test_a_collapse_is_undone(improve):
    unguarded, _, _ = improve("adamw", "--lr", "0.1", "--kl", "0", "--collapse", "0")
    assert unguarded.after < 0.3 * unguarded.before
    guarded, found, printed = improve("adamw", "--lr", "0.1", "--kl", "0")
    assert guarded.restores >= 1
    assert guarded.restores == sum(line["restored"] for line in found)
    assert "collapsed, back to the best state with updates times 0.5" in printed
    assert found[-1]["step_scale"] == 0.5**guarded.restores
    assert guarded.after > 2 * unguarded.after


def arrays(directory: pathlib.Path, step: int) -> list[np.ndarray]:
    with ocp.CheckpointManager(directory) as manager:
        return [
            np.asarray(x)
            for x in jax.tree.leaves(manager.restore(step, args=ocp.args.StandardRestore()))
        ]


def without_times(directory: pathlib.Path) -> list[dict[str, float]]:
    found = lines(directory, "galore")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found]


# Attention joins after 2 iterations, so the interrupted run is resumed with one set of targets and
# goes on with another.
STAGED = [
    *TINY,
    *shlex.split("--optimizer galore --rank 4 embedding=full head=full --refresh-every 5"),
    *shlex.split("--progressive 2 --iterations 4 --eval-every 3 --matrix-free"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """The checkpoints and the log of a staged GaLore run that nobody interrupted."""
    directory = tmp_path_factory.mktemp("finished")
    places = ["--checkpoint", f"{directory}/run", "--log-dir", f"{directory}/log"]
    assert rl.main([*STAGED, *places, "--checkpoint-every", "2"]) == 0
    return directory


@pytest.mark.slow
def test_resuming_between_stages_continues_bit_by_bit(finished, tmp_path, monkeypatch, capsys):
    observe = RewardReporter.step

    def interrupt(self, step, metrics):
        observe(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    places = ["--checkpoint", f"{tmp_path}/run", "--log-dir", f"{tmp_path}/log"]
    command = [*STAGED, *places]
    with monkeypatch.context() as patch:
        patch.setattr(RewardReporter, "step", interrupt)
        assert rl.main(command) == 130
    assert capsys.readouterr().err == (
        "rl: interrupted after iteration 2 of 4; checkpoint saved, go on with --resume\n"
    )
    assert rl.main([*command, "--resume"]) == 0
    ours, theirs = (arrays(place / "run" / "galore", 4) for place in (tmp_path, finished))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    found = without_times(finished / "log")
    assert without_times(tmp_path / "log") == found
    # There was something to learn from.
    assert all(line["reward"] > 0.05 and line["grad_norm"] > 0.05 for line in found)


def test_stages_project_more_and_more(finished, capsys):
    places = ["--checkpoint", f"{finished}/run", "--resume", "--describe"]
    assert rl.main([*STAGED, *places]) == 0  # nothing is left to do but to describe and to report
    assert "self_attn/q_proj/kernel" in capsys.readouterr().out
    sizes = [sum(x.size for x in arrays(finished / "run" / "galore", step)) for step in (2, 4)]
    assert sizes[0] > sizes[1]  # AdamW's moments of attention became those of cores


def test_addition_under_grpo(tmp_path, capsys):
    options = "--task addition --iterations 2 --group 4 --stop-kl 0.1 --optimizer adamw logra"
    assert rl.main([*TINY, *shlex.split(options), "--log-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in ("adamw", "logra"):
        found = lines(tmp_path, name)
        assert len(found) == 2
        assert found[0]["length"] == 3
        assert "value_loss" not in found[0]
        assert name in printed[printed.index("before") :]


STAGED_RUN = "--checkpoint {finished}/run --resume"
ERRORS = {
    "unknown optimizer": ("--optimizer sgd", "'sgd' (choose from "),
    "unknown task": ("--task chess", "'chess' (choose from "),
    "unknown algorithm": ("--algorithm dpo", "'dpo' (choose from "),
    "unknown class": ("--rank norm=4", "names none of the classes mlp, attention, embedding, head"),
    "rank 0": ("--rank mlp=0", "is not a rank"),
    "class twice": ("--rank mlp=3 mlp=4", "--rank sets a value twice"),
    "nothing projected": ("--rank full", "--rank full leaves nothing for galore to project"),
    "rank without use": (
        "--optimizer adamw --rank 4",
        "--rank has no effect on adamw: leave it out or add",
    ),
    "rate of another": ("--lr adamw=1e-3", "--lr adamw=... has no effect: add adamw"),
    "rate of nothing": ("--lr sgd=1e-3", "names none of adamw, galore, logra"),
    "refresh without use": (
        "--optimizer logra --refresh-every 5",
        "--refresh-every has no effect without galore",
    ),
    "matrix-free logra": ("--optimizer logra galore --matrix-free", "choose --optimizer galore"),
    "matrix-free monitor": ("--matrix-free --monitor-every 2", "leave one of them out"),
    "lone snr": ("--min-snr 2", "--min-snr has no effect alone: add --monitor-every"),
    "group of ppo": ("--group 4", "--group has no effect on ppo: use --algorithm grpo"),
    "value of grpo": ("--algorithm grpo --value-weight 1", "--value-weight has no effect on grpo"),
    "group of 1": ("--algorithm grpo --group 1", "leaves nothing to compare an answer with"),
    "uneven groups": ("--algorithm grpo --group 3", "64 does not divide into groups of --group 3"),
    "uneven batches": ("--minibatches 3", "64 does not divide into --minibatches 3"),
    "share": ("--collapse 2", "2 is not a number from 0 to 1"),
    "heads": ("--heads 5", "is not a multiple of"),
    "lone resume": ("--resume", "--resume has no effect alone: add --checkpoint DIR"),
    "nothing to resume": ("--checkpoint {tmp}/no --resume", "--resume finds no checkpoint in"),
    "existing run": ("--checkpoint {finished}/run", "is not empty: continue its run with --resume"),
    "existing log": ("--log-dir {finished}/log", "galore.jsonl' exists already"),
    "another rank": (STAGED_RUN + " --rank 2", "optimizer.ranks.mlp=4 (now"),
    "another task": (STAGED_RUN + " --task addition", "task='paths' (now"),
    "past the end": (
        " ".join(STAGED[len(TINY) :]) + " --iterations 2 --checkpoint {finished}/run --resume",
        "has seen 4 iterations, more than --iterations 2",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_name_the_choices(case, finished, tmp_path, capsys):
    options, message = ERRORS[case]
    extra = options.format(tmp=tmp_path, finished=finished).split()
    assert rl.main([*TINY, "--optimizer", "galore", *extra]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("rl: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []
