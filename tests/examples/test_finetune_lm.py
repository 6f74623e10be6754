"""The script as a user runs it."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import finetune_lm
from running import reporting

ROOT = pathlib.Path(__file__).parents[2]
MODEL = shlex.split(
    "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --seq-len 16 --batch-size 4"
)
GALORE = [*MODEL, *shlex.split("--optimizer galore --rank 4 --refresh-every 2 --steps 6")]


pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(200)))
    return str(path)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> pathlib.Path:
    """The checkpoints and the log of a GaLore run that nobody interrupted."""
    directory = tmp_path_factory.mktemp("finished")
    places = ["--checkpoint", f"{directory}/run", "--log-dir", f"{directory}/log"]
    assert finetune_lm.main([*GALORE, "--data", text, *places, "--checkpoint-every", "3"]) == 0
    return directory


def start(*options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which the library need not be installed."""
    command = [sys.executable, "examples/finetune_lm.py", *options]
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def arrays(directory: pathlib.Path, step: int) -> list[np.ndarray]:
    with ocp.CheckpointManager(directory) as manager:
        return [
            np.asarray(x)
            for x in jax.tree.leaves(manager.restore(step, args=ocp.args.StandardRestore()))
        ]


def losses(directory: pathlib.Path) -> list[tuple]:
    lines = (directory / "log" / "galore.jsonl").read_text().splitlines()
    keys = ("step", "loss", "grad_norm", "learning_rate", "val_loss")
    return [tuple(json.loads(line).get(key) for key in keys) for line in lines]


def test_from_end_to_end(text):
    done = start(*MODEL, "--steps", "4", "--data", text, "--accumulate", "2", "--describe")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"adamw +step +4 +loss \d\.\d+.*val \d\.\d+", done.stdout)
    table = done.stdout[done.stdout.index("optimizer") :]
    adamw, galore = (re.search(rf"{name} .*", table) for name in ("adamw", "galore"))
    assert adamw
    assert galore
    assert "100.0%" in adamw[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", galore[0])]
    assert shares[0] < 100
    assert re.search(r"\d ms", galore[0])


def test_lowrank_trains_matrix_free(text, tmp_path):
    options = f"--optimizer lowrank --matrix-free --rank 4 --steps 6 --log-dir {tmp_path}"
    assert finetune_lm.main([*MODEL, *shlex.split(options), "--data", text]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lowrank.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_every_step_is_logged(finished):
    lines = [json.loads(x) for x in (finished / "log" / "galore.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert {"loss", "learning_rate", "grad_norm", "tokens_per_second"} <= line.keys()
    assert "val_loss" in lines[-1]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_resuming_continues_bit_by_bit(text, finished, tmp_path, monkeypatch, capsys):
    observe = reporting.Reporter.step

    def interrupt(self, step, metrics):
        observe(self, step, metrics)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    # A shell starts background jobs with interrupts ignored; whatever was set comes back.
    before = signal.getsignal(signal.SIGINT)
    places = ["--checkpoint", f"{tmp_path}/run", "--log-dir", f"{tmp_path}/log"]
    command = [*GALORE, "--data", text, *places]
    with monkeypatch.context() as patch:
        patch.setattr(reporting.Reporter, "step", interrupt)
        assert finetune_lm.main(command) == 130
    assert capsys.readouterr().err == (
        "finetune_lm: interrupted after step 3 of 6; checkpoint saved, go on with --resume\n"
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert finetune_lm.main([*command, "--resume"]) == 0
    assert capsys.readouterr().err == ""
    for ours, theirs in zip(
        arrays(tmp_path / "run" / "galore", 6), arrays(finished / "run" / "galore", 6), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert losses(tmp_path) == losses(finished)


# The process dies as by kill -9: after a step; while the bytes of a checkpoint are there but not
# its name; while the configuration is being written.
KILLS = {
    "in training": """
from running import reporting
observe = reporting.Reporter.step
def step(self, number, metrics):
    observe(self, number, metrics)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
reporting.Reporter.step = step
""",
    "in a save": """
rename = os.rename
def dying(source, *rest, **options):
    if "/6" in str(source) and "tmp" in str(source):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, *rest, **options)
os.rename = os.replace = dying
""",
    "in the first save": """
import pathlib
replace = pathlib.Path.replace
def dying(self, target):
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = dying
""",
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_goes_on_bit_by_bit(kill, text, finished, tmp_path, capsys):
    places = ["--checkpoint", f"{tmp_path}/run", "--log-dir", f"{tmp_path}/log"]
    command = [*GALORE, "--data", text, *places, "--checkpoint-every", "3"]
    code = (
        "import os, signal, sys\nsys.path.insert(0, 'examples')\n"
        + KILLS[kill]
        + "import finetune_lm\nsys.exit(finetune_lm.main(sys.argv[1:]))"
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    saved = [p.name for p in (tmp_path / "run" / "galore").iterdir() if p.name.isdigit()]
    assert saved == ([] if kill == "in the first save" else ["3"])

    resume = ["--resume"] if saved else []
    if not saved:
        # Nothing to go on from: it says so, and touches nothing.
        before = contents(tmp_path)
        assert finetune_lm.main([*command, "--resume"]) == 2
        assert "finds no checkpoint" in capsys.readouterr().err
        assert contents(tmp_path) == before
        return
    assert finetune_lm.main([*command, *resume]) == 0
    for ours, theirs in zip(
        arrays(tmp_path / "run" / "galore", 6), arrays(finished / "run" / "galore", 6), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert losses(tmp_path) == losses(finished)


def test_a_finished_run_is_only_reported(text, finished, capsys):
    before = contents(finished)
    places = ["--checkpoint", f"{finished}/run", "--log-dir", f"{finished}/log", "--resume"]
    assert finetune_lm.main([*GALORE, "--data", text, *places]) == 0
    val_loss = losses(finished)[-1][-1]
    assert f"{val_loss:.4f}" in capsys.readouterr().out
    assert contents(finished) == before


def test_a_mesh_trains_alike(text, finished, tmp_path, capsys):
    places = ["--checkpoint", f"{tmp_path}/run", "--log-dir", f"{tmp_path}/log"]
    command = [*GALORE, "--data", text, *places, "--checkpoint-every", "3"]
    assert finetune_lm.main([*command, "--mesh", "fsdp=4,tp=2"]) == 0
    assert capsys.readouterr().err == ""
    # step, loss, gradient norm, rate, validation loss
    ours, theirs = (np.array(losses(d), float) for d in (tmp_path, finished))
    np.testing.assert_allclose(ours[:, :4], theirs[:, :4], rtol=2e-3)

    # From its middle on, on a mesh of another shape.
    shutil.rmtree(tmp_path / "run" / "galore" / "6")
    assert finetune_lm.main([*command, "--resume", "--mesh", "data=2,fsdp=2,tp=2"]) == 0
    again = np.array(losses(tmp_path), float)
    np.testing.assert_array_equal(again[:3, :4], ours[:3, :4])
    np.testing.assert_allclose(again[:, :4], ours[:, :4], rtol=2e-3)


RUN = "--checkpoint {finished}/run"
ERRORS = {
    "missing data": ("--data {tmp}/none.txt", "none.txt cannot be read (No such file"),
    "directory as data": ("--data {tmp}", "cannot be read (Is a directory)"),
    "short data": ("--data {tmp}/short.txt", "has 20 bytes, which is too short"),
    "rank 0": ("--rank 0", "--rank: 0 is not a rank; give an integer of at least 1"),
    "negative rank": ("--rank -3", "--rank: -3 is not a rank"),
    "rank above 1": ("--rank 1.5", "--rank: 1.5 is not a rank"),
    "text as rank": ("--rank big", "--rank: big is not a"),
    "unknown optimizer": ("--optimizer sgd", "invalid choice: 'sgd'"),
    "same optimizer": ("--optimizer adamw adamw", "names an optimizer twice"),
    "unknown option": ("--nonsense", "unrecognized arguments: --nonsense"),
    "negative rate": ("--lr -1", "--lr: -1 is not a number of at least 0"),
    "rate of another": ("--lr adamw=1e-3", "--lr adamw=... has no effect: add adamw"),
    "rate twice": ("--lr 1e-3 1e-2", "sets a learning rate twice"),
    "matrix-free alone": ("--optimizer adamw --matrix-free", "--matrix-free has no effect on"),
    "rank without use": ("--optimizer adamw --rank 4", "--rank has no effect on adamw"),
    "uneven": ("--accumulate 3", "--batch-size 4 does not divide into --accumulate 3"),
    "only warm-up": ("--warmup 6", "--warmup 6 leaves nothing of --steps 6"),
    "heads": ("--heads 3 --kv-heads 2", "num_attention_heads=3 is not a multiple"),
    "lone resume": ("--resume", "--resume has no effect alone: add --checkpoint DIR"),
    "lone interval": ("--checkpoint-every 2", "--checkpoint-every has no effect alone"),
    "nothing to resume": ("--checkpoint {tmp}/no --resume", "--resume finds no checkpoint of gal"),
    "existing run": (RUN, "is not empty: continue its run with --resume"),
    "file as directory": ("--checkpoint {tmp}/short.txt/run", "short.txt' is not a directory"),
    "file as log directory": ("--log-dir {tmp}/short.txt", "short.txt' is not a directory"),
    "existing log": ("--log-dir {finished}/log", "galore.jsonl' exists already"),
    "another rank": (RUN + " --resume --rank 2", "optimizer.rank=4 (now 2)"),
    "another shape": (RUN + " --resume --ffn 32", "model.intermediate_size=24 (now 32)"),
    "another text": (RUN + " --resume --data {tmp}/other.txt", "has data='"),
    "another length": (RUN + " --resume --steps 7", "steps=6 (now 7): resume it with the same"),
    "no mesh": ("--mesh fsdp", "--mesh: fsdp is no mesh; give sizes of data, fsdp, tp"),
    "unknown axis": ("--mesh fspd=8", "--mesh: fspd=8 is no mesh"),
    "devices": ("--mesh fsdp=3", "--mesh wants 3 devices and there are 8"),
    "batch": ("--mesh fsdp=8", "splits a micro-batch of 4 over 8 devices"),
    "no process": ("--mesh fsdp=8 --distributed a:1,2,2", "a:1,2,2 is no process; give the add"),
    "lone process": ("--distributed", "--distributed has no effect alone: add --mesh"),
    "no config": ("--checkpoint {tmp}/torn --resume", "has checkpoints but no readable config"),
    "damaged": ("--checkpoint {tmp}/damaged --resume", "cannot be restored"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_change_nothing(case, text, finished, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("x" * 20)
    (tmp_path / "other.txt").write_text("y" * 2000)
    (tmp_path / "torn" / "galore" / "3").mkdir(parents=True)
    damaged = tmp_path / "damaged" / "galore"
    (damaged / "3" / "default").mkdir(parents=True)
    config = (finished / "run" / "galore" / "config.json").read_bytes()
    (damaged / "config.json").write_bytes(config)
    before = contents(finished) | contents(tmp_path)

    options, message = ERRORS[case]
    extra = options.format(tmp=tmp_path, finished=finished).split()
    assert finetune_lm.main([*GALORE, "--data", text, *extra]) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("finetune_lm: error: ")
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert contents(finished) | contents(tmp_path) == before


def test_errors_of_the_process():
    done = start("--rank", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
