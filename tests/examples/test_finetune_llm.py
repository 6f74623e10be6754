"""Fine-tuning Hugging Face models as a user does it."""

import json
import os
import pathlib
import shlex
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint_hf
import finetune_llm
import hf_config
import reporting
from decoder import functional

hf_models = pytest.importorskip("tests.examples.hf_models", reason="needs transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("standard_promotion", "compile_once"),
]

RUN = shlex.split("--seq-len 32 --steps 4 --lr 1e-2 --batch-size 8 --eval-every 2")
GALORE = shlex.split("--rank 4 --refresh-every 2")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """A model of each family, and data."""
    directory = tmp_path_factory.mktemp("llm")
    for family in hf_models.FAMILIES:
        hf_models.make_model(directory / family, family, tied=family == "Qwen2")
    hf_models.write_chat(directory / "chat.jsonl")
    return directory


def command(root: pathlib.Path, family: str, *options: str) -> list[str]:
    tuned = [] if "adamw" in options else GALORE
    return ["--model", f"{root}/{family}", "--data", f"{root}/chat.jsonl", *RUN, *tuned, *options]


def read_log(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(directory: pathlib.Path, dtype: str = "float32"):
    init, apply = functional(hf_config.read_config(directory, param_dtype=dtype, dtype=dtype))
    return checkpoint_hf.load(directory, jax.eval_shape(init, jax.random.key(0))), apply


def logits(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    params, apply = load(directory)
    return np.asarray(jax.jit(apply)(params, jnp.asarray(tokens)))


OPTIONS = {
    "Qwen2": "--precision float32 --accumulate 2",
    "Qwen3": "--precision master --matrix-free --accumulate 2 --weight-decay 0.1",
    "Llama": "--precision stochastic --schedule constant --optimizer adamw",
}


@pytest.mark.parametrize("family", OPTIONS)
def test_train_and_export(family, root, tmp_path, capsys):
    options = shlex.split(OPTIONS[family])
    places = ["--export", f"{tmp_path}/out", "--log", f"{tmp_path}/log.jsonl"]
    run = command(root, family, *options, *places)
    assert finetune_llm.main(run) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "examples in" in captured.out
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    before = float(captured.out.split("before training: val ")[1].split()[0])
    assert lines[-1]["val_loss"] < lines[1]["val_loss"] < before

    tokens = np.random.default_rng(0).integers(0, len(hf_models.VOCABULARY), (2, 30))
    ours, theirs = logits(tmp_path / "out", tokens), hf_models.logits_of(tmp_path / "out", tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    old, new = (load(path)[0] for path in (root / family, tmp_path / "out"))
    moved = jax.tree.map(lambda a, b: not np.allclose(a, b, atol=1e-3), old, new)
    assert all(jax.tree.leaves(moved))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_resuming_continues_bit_by_bit(root, tmp_path, monkeypatch, capsys):
    observe = reporting.Reporter.step

    def interrupt(self, step, metrics):
        observe(self, step, metrics)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def run(name: str, *options: str) -> list[str]:
        places = ["--checkpoint", f"{tmp_path}/{name}", "--export", f"{tmp_path}/{name}-out"]
        return command(root, "Qwen2", "--lora", "attention=2", *places, *options)

    assert finetune_llm.main(run("whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(reporting.Reporter, "step", interrupt)
        assert finetune_llm.main(run("parts")) == 130
    assert "interrupted after step 3 of 4; checkpoint saved" in capsys.readouterr().err
    assert not (tmp_path / "parts-out").exists()
    assert finetune_llm.main(run("parts", "--resume")) == 0
    weights = [tmp_path / f"{name}-out" / "model.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    # A finished run is only exported again, where that was asked for.
    assert finetune_llm.main(run("parts", "--resume")) == 2
    assert "is not empty: choose another --export" in capsys.readouterr().err
    assert finetune_llm.main(run("parts", "--resume", "--overwrite")) == 0
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert finetune_llm.main(run("parts", "--resume", "--overwrite", "--lora-lr", "1")) == 2
    assert "has optimizer.lora_lr=0.0002 (now 1.0)" in capsys.readouterr().err


def test_lora_changes_what_it_adapts_by_its_rank(root, tmp_path):
    out = tmp_path / "out"
    options = shlex.split("--precision float32 --lora attention=2 down_proj=3 --lora-lr 1e-2")
    assert finetune_llm.main(command(root, "Llama", *options, "--export", str(out))) == 0
    old, new = (load(path)[0]["layers"] for path in (root / "Llama", out))
    ranks = {("self_attn", f"{name}_proj"): 2 for name in "qkvo"} | {("mlp", "down_proj"): 3}
    for module, name in [*ranks, ("mlp", "up_proj"), ("mlp", "gate_proj")]:
        change = np.asarray(new[module][name]["kernel"] - old[module][name]["kernel"])
        values = np.linalg.svd(change, compute_uv=False)
        rank = np.count_nonzero(values > 1e-4 * values.max(axis=1, keepdims=True), axis=1)
        # Refreshed twice, GaLore's changes have up to twice its rank.
        assert np.all(rank == ranks[module, name] if (module, name) in ranks else rank > 4)
    tokens = np.random.default_rng(0).integers(0, len(hf_models.VOCABULARY), (2, 30))
    np.testing.assert_allclose(
        logits(out, tokens), hf_models.logits_of(out, tokens), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    ["", pytest.param("--matrix-free --lora attention=2", marks=pytest.mark.slow)],
)
def test_a_mesh_gives_the_same_losses(options, root, tmp_path, monkeypatch):
    placed = []
    make_train_step = finetune_llm.training.make_train_step

    def spy(gradients, tx, shardings=None):
        placed.append(shardings)
        return make_train_step(gradients, tx, shardings)

    monkeypatch.setattr(finetune_llm.training, "make_train_step", spy)
    losses = []
    for name, mesh in (("one", []), ("many", ["--mesh", "fsdp=4", "tensor=2"])):
        log, save = f"{tmp_path}/{name}.jsonl", f"{tmp_path}/{name}"
        more = [*shlex.split(options), "--precision", "float32", *mesh, "--log", log]
        assert finetune_llm.main(command(root, "Qwen3", *more, "--export", save)) == 0
        losses.append([(x["loss"], x["grad_norm"]) for x in read_log(pathlib.Path(log))])
    np.testing.assert_allclose(*losses, rtol=2e-3)
    weights = [load(tmp_path / name)[0] for name in ("one", "many")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), *weights)
    assert placed[0] is None
    params, state = placed[1]
    spec = params["layers"]["mlp"]["up_proj"]["kernel"].spec
    assert spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    divided = [s for s in jax.tree.leaves(state) if not s.is_fully_replicated]
    assert len(divided) > 10


def test_long_examples_are_left_out_when_asked(root, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    long = {"prompt": " ".join(["1"] * 60), "completion": "2"}
    data.write_text((root / "chat.jsonl").read_text() + json.dumps(long) + "\n")
    run = [*command(root, "Qwen2", *shlex.split(OPTIONS["Qwen2"])), "--data", str(data)]
    assert finetune_llm.main(run) == 2
    assert f"{data}:25: 61 tokens do not fit into --seq-len 32" in capsys.readouterr().err
    assert finetune_llm.main([*run, "--drop-long", "--describe"]) == 0
    out = capsys.readouterr().out
    assert f"left out 1 of 25 examples of {data}" in out
    assert "layers/mlp/up_proj/kernel" in out


ERRORS = {
    "no model": ("--model none", "--model none is no directory"),
    "no data": ("--data none.jsonl", "'none.jsonl' cannot be read"),
    "a bad line": ("--data {tmp}/bad.jsonl", "bad.jsonl:1: keys promt, completion; expected"),
    "bad validation": ("--validation {tmp}/bad.jsonl", "bad.jsonl:1: keys promt"),
    "typo": ("--acumulate 2", "unrecognized arguments: --acumulate 2"),
    "abbreviation": ("--exp x", "unrecognized arguments: --exp x"),
    "unknown precision": ("--precision fp8", "invalid choice: 'fp8'"),
    "too long": (
        "--seq-len 65",
        "--seq-len 65 is more than the model's max_position",
    ),
    "does not fit": ("--seq-len 6", "tokens do not fit into --seq-len 6"),
    "uneven": ("--accumulate 3", "--batch-size 8 does not divide into --accumulate 3"),
    "only warm-up": ("--warmup 4", "--warmup 4 leaves nothing of 4 steps"),
    "two lengths": ("--epochs 2", "not allowed with argument --steps"),
    "mesh axis": ("--mesh fdsp=8", "fdsp=8 is not AXIS=SIZE with AXIS one of data, fsdp, tensor"),
    "mesh size": ("--mesh fsdp=3", "--mesh fsdp=3 is of 3 devices, and JAX sees 8"),
    "mesh twice": ("--mesh fsdp=2 fsdp=4", "--mesh names an axis twice"),
    "mesh rows": (
        "--mesh fsdp=8 --batch-size 4",
        "4 rows of a micro-batch do not divide over the 8",
    ),
    "lora name": ("--lora atention=8", "--lora atention=8 is not NAME=RANK"),
    "lora twice": ("--lora mlp=2 up_proj=1", "gives up_proj a rank a second time"),
    "alpha alone": ("--lora-alpha 8", "--lora-alpha has no effect alone: add --lora"),
    "quantize alone": ("--quantize int8", "--quantize has no effect alone: add --lora"),
    "rank of adamw": ("--optimizer adamw --rank 4", "--rank has no effect on adamw"),
    "lone resume": ("--resume", "--resume has no effect alone: add --checkpoint"),
    "lone overwrite": ("--overwrite", "--overwrite has no effect alone: add --export"),
    "full export": ("--export {tmp}", "is not empty: choose another --export directory"),
    "export to model": ("--export {root}/Qwen2 --overwrite", "is the model itself"),
    "export below file": ("--export {tmp}/bad.jsonl/x", "bad.jsonl' is not a directory"),
    "existing log": ("--log {tmp}/bad.jsonl", "bad.jsonl' exists already"),
    "nothing to resume": ("--checkpoint {tmp}/no --resume", "--resume finds no checkpoint in"),
    "full checkpoint": ("--checkpoint {tmp}", "is not empty: continue its run with --resume"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_change_nothing(case, root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"promt": "1", "completion": "2"}\n')
    options, message = ERRORS[case]
    before = contents(root) | contents(tmp_path)
    more = options.format(tmp=tmp_path, root=root).split()
    assert finetune_llm.main(command(root, "Qwen2", *more)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("finetune_llm: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert contents(root) | contents(tmp_path) == before


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("library", "extra"), [("safetensors", "llm"), ("transformers", "llm"), ("qwix", "qwix")]
)
def test_a_missing_library_is_named(library, extra, root, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    options = ["--lora", "mlp=2", "--quantize", "int8"] if library == "qwix" else []
    assert finetune_llm.main(command(root, "Qwen2", *options)) == 2
    assert f"pip install 'lowrank-optax[{extra}]'" in capsys.readouterr().err
