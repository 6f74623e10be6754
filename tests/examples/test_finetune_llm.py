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

import finetune_llm
from huggingface import chat, packing, weights
from huggingface.config import read_config
from model.decoder import functional
from running import reporting, training

pytest.importorskip("torch", reason="the conformance extra")
pytest.importorskip("transformers", reason="the conformance extra")

from tests.examples import hf_models

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
    init, apply = functional(read_config(directory, param_dtype=dtype, dtype=dtype))
    return weights.load(directory, jax.eval_shape(init, jax.random.key(0))), apply


def logits(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    params, apply = load(directory)
    return np.asarray(jax.jit(apply)(params, jnp.asarray(tokens)))


def answer_loss(root: pathlib.Path, directory: pathlib.Path) -> float:
    """The loss of a held-out answer's tokens, one text at a time, by transformers."""
    tokenizer = chat.load_tokenizer(directory)
    _, held_out = packing.hold_out(chat.read_examples(root / "chat.jsonl", tokenizer))
    losses = []
    for example in held_out:
        logits = hf_models.logits_of(directory, example.tokens[None, :-1].astype(np.int64))[0]
        nats = -jax.nn.log_softmax(logits)[np.arange(example.length), example.tokens[1:]]
        losses.append(np.asarray(nats)[example.learned[1:]])
    return float(np.mean(np.concatenate(losses)))


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
    tolerance = 1e-4 if "float32" in options else 0.02
    assert before == pytest.approx(answer_loss(root, root / family), abs=tolerance)
    after = answer_loss(root, tmp_path / "out")
    assert lines[-1]["val_loss"] == pytest.approx(after, abs=tolerance)

    tokens = np.random.default_rng(0).integers(0, len(hf_models.VOCABULARY), (2, 30))
    ours, theirs = logits(tmp_path / "out", tokens), hf_models.logits_of(tmp_path / "out", tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    old, new = (load(path)[0] for path in (root / family, tmp_path / "out"))
    moved = jax.tree.map(lambda a, b: not np.allclose(a, b, atol=1e-3), old, new)
    assert all(jax.tree.leaves(moved))
    assert (tmp_path / "out" / "tokenizer.json").exists()


LORA = shlex.split(
    "--precision float32 --matrix-free --lora attention=2 down_proj=3 --lora-lr 1e-2"
)


def run_lora(root: pathlib.Path, places: pathlib.Path, *options: str) -> int:
    """Adapters on some layers, GaLore on the others; all of its output is below ``places``."""
    output = shlex.split(f"--export {places}/out --log {places}/log --checkpoint {places}/run")
    return finetune_llm.main(command(root, "Llama", *LORA, *output, *options))


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> pathlib.Path:
    """What `run_lora` left behind when nobody interrupted it."""
    directory = tmp_path_factory.mktemp("whole")
    assert run_lora(root, directory) == 0
    return directory


def test_lora_changes_what_it_adapts_by_its_rank(root, whole):
    old, new = (load(path)[0]["layers"] for path in (root / "Llama", whole / "out"))
    ranks = {("self_attn", f"{name}_proj"): 2 for name in "qkvo"} | {("mlp", "down_proj"): 3}
    for module, name in [*ranks, ("mlp", "up_proj"), ("mlp", "gate_proj")]:
        change = np.asarray(new[module][name]["kernel"] - old[module][name]["kernel"])
        values = np.linalg.svd(change, compute_uv=False)
        rank = np.count_nonzero(values > 1e-4 * values.max(axis=1, keepdims=True), axis=1)
        # Refreshed twice, GaLore's changes have up to twice its rank.
        assert np.all(rank == ranks[module, name] if (module, name) in ranks else rank > 4)
    tokens = np.random.default_rng(0).integers(0, len(hf_models.VOCABULARY), (2, 30))
    ours, theirs = logits(whole / "out", tokens), hf_models.logits_of(whole / "out", tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_resuming_continues_bit_by_bit(root, whole, tmp_path, monkeypatch, capsys):
    observe = reporting.Reporter.step

    def interrupt(self, step, metrics):
        observe(self, step, metrics)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(reporting.Reporter, "step", interrupt)
        assert run_lora(root, tmp_path) == 130
    assert "interrupted after step 3 of 4; checkpoint saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run_lora(root, tmp_path, "--resume") == 0
    weights = [path / "out" / "model.safetensors" for path in (whole, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    # A finished run is only exported again, where that was asked for.
    before = contents(tmp_path)
    assert run_lora(root, tmp_path, "--resume") == 2
    assert "is not empty: choose another --export" in capsys.readouterr().err
    assert run_lora(root, tmp_path, "--resume", "--overwrite", "--lora-lr", "1") == 2
    assert "has optimizer.lora_lr=0.01 (now 1.0)" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert run_lora(root, tmp_path, "--resume", "--overwrite") == 0
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_mesh_gives_the_same_losses(root, whole, tmp_path, monkeypatch):
    placed = []
    make_train_step = training.make_train_step

    def spy(gradients, tx, shardings=None):
        placed.append(shardings)
        return make_train_step(gradients, tx, shardings)

    monkeypatch.setattr(training, "make_train_step", spy)
    assert run_lora(root, tmp_path, "--mesh", "fsdp=4,tp=2") == 0
    losses = [
        [(x["loss"], x["grad_norm"]) for x in read_log(path / "log")] for path in (whole, tmp_path)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-3)
    weights = [load(path / "out")[0] for path in (whole, tmp_path)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), *weights)
    ((params, state),) = placed
    spec = params["layers"]["mlp"]["up_proj"]["kernel"].spec
    assert spec == jax.sharding.PartitionSpec(None, "fsdp", "tp")
    assert sum(not place.is_fully_replicated for place in jax.tree.leaves(state)) > 10


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
    "mesh axis": ("--mesh fdsp=8", "fdsp=8 is no mesh; give sizes of data, fsdp, tp"),
    "mesh size": ("--mesh fsdp=3", "--mesh wants 3 devices and there are 8"),
    "mesh twice": ("--mesh fsdp=2,fsdp=4", "fsdp=2,fsdp=4 is no mesh"),
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
