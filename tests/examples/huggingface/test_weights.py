"""Checkpoints of transformers give its logits here, and ours give ours there."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from huggingface import weights
from huggingface.config import find_model, read_config
from model.decoder import functional
from running.errors import UserError

pytest.importorskip("torch", reason="the conformance extra")
pytest.importorskip("transformers", reason="the conformance extra")

from tests.examples import hf_models

pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, len(hf_models.VOCABULARY), (2, 40))
CASES = [("Qwen2", True), ("Qwen2", False), ("Qwen3", False), ("Llama", False), ("Llama", True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with a checkpoint of each case."""
    root = tmp_path_factory.mktemp("models")
    for family, tied in CASES:
        hf_models.make_model(root / f"{family}-{tied}", family, tied)
    return root


def load(directory, dtype="float32", shardings=None):
    config = read_config(directory, param_dtype=dtype)
    init, apply = functional(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return weights.load(directory, shapes, shardings), apply


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_logits_in_and_out(models, family, tied, tmp_path):
    source = models / f"{family}-{tied}"
    assert len(list(source.glob("*.safetensors"))) > 2
    params, apply = load(source)
    ours, theirs = apply(params, jnp.asarray(TOKENS)), hf_models.logits_of(source, TOKENS)
    assert np.std(theirs) > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)

    # Changed, since a copy of the source's files would else do; in shards of another size.
    changed = jax.tree.map(lambda x: 1.1 * x, params)
    out = tmp_path / "out"
    weights.export(out, changed, source, shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    ours, theirs = apply(changed, jnp.asarray(TOKENS)), hf_models.logits_of(out, TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    again, _ = load(out)
    jax.tree.map(np.testing.assert_array_equal, again, changed)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()


def test_bfloat16(models, tmp_path):
    source = models / "Qwen2-True"
    params, _ = load(source, "bfloat16")
    exact, _ = load(source)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), params, exact
    )
    weights.export(tmp_path / "out", params, source)
    assert (tmp_path / "out" / "model.safetensors").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    again, _ = load(tmp_path / "out", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_each_device_reads_its_part(models):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole, _ = load(models / "Llama-False")

    def spread(leaf):
        spec = jax.sharding.PartitionSpec(*("ab"[i % 2] for i in range(min(leaf.ndim, 2))))
        fits = all(size % 2 == 0 for size in leaf.shape[:2])
        return jax.sharding.NamedSharding(mesh, spec if fits else jax.sharding.PartitionSpec())

    shardings = jax.tree.map(spread, whole)
    params, _ = load(models / "Llama-False", shardings=shardings)
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, 16, 48)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


def test_configs_of_older_transformers(models, tmp_path):
    content = json.loads((models / "Llama-False" / "config.json").read_text())
    rope = content.pop("rope_parameters")
    old = content | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_config(tmp_path) == read_config(models / "Llama-False")


def edit_config(**changes):
    def edit(directory):
        path = directory / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def edit_index(directory):
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps(content))


def first_shard(directory):
    return min(directory.glob("*.safetensors"))


ERRORS = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json' is missing"),
    "no json": (lambda d: (d / "config.json").write_text("{"), "config.json' cannot be read"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "holds list, expected a JSON obj"),
    "architecture": (edit_config(model_type="gpt2"), "model_type='gpt2': the decoder can be one"),
    "no size": (edit_config(hidden_size=None), "lacks hidden_size"),
    "activation": (edit_config(hidden_act="gelu"), "has hidden_act='gelu', which the decoder"),
    "bias": (edit_config(attention_bias=True), "has attention_bias=True"),
    "window": (edit_config(use_sliding_window=True), "has use_sliding_window=True"),
    "quantised": (edit_config(quantization_config={"bits": 4}), "name the checkpoint that was not"),
    "rope": (edit_config(rope_parameters={"rope_type": "yarn"}), "has rope_type='yarn'"),
    "rope key": (edit_config(rope_parameters={"rope_type": "llama3"}), "lacks 'factor' of the"),
    "heads": (edit_config(num_attention_heads=3), "describes an impossible model: num_attention"),
    "no weights": (lambda d: [f.unlink() for f in d.glob("model*")], "has neither model.safetens"),
    "shard": (lambda d: first_shard(d).unlink(), "is missing, though model.safetensors.index.json"),
    "damaged": (lambda d: first_shard(d).write_bytes(b"xxxxxxxxx"), "is damaged"),
    "tensor": (edit_index, "lacks model.layers.1.mlp.up_proj.weight (1 such tensors)"),
    "more": (edit_config(num_hidden_layers=1), "knows nothing of, model.layers.1"),
    "shape": (
        edit_config(intermediate_size=50),
        "has shape (32, 48), and config.json says (32, 50",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_file_and_the_fix(case, models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models / "Llama-False", source)
    spoil, message = ERRORS[case]
    spoil(source)
    with pytest.raises(UserError) as error:
        load(source)
    assert message in str(error.value)
    assert str(source) in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_is_overwritten_unasked(models, tmp_path):
    source = models / "Llama-False"
    params, _ = load(source)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    (out / "model-00001-of-00009.safetensors").write_text("an older export")
    with pytest.raises(UserError, match="is not empty: choose another --export directory, or add"):
        weights.export(out, params, source)
    assert len(list(out.iterdir())) == 2
    weights.export(out, params, source, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    load(out)
    before = {file.name: file.stat().st_mtime_ns for file in source.iterdir()}
    with pytest.raises(UserError, match="is the model itself"):
        weights.export(source, params, source, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        weights.export(out / "thesis.tex", params, source, overwrite=True)
    assert {file.name: file.stat().st_mtime_ns for file in source.iterdir()} == before


def test_models_are_found_by_path_or_name(models, tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    assert find_model(str(models)) == models
    for name in ("no/such/directory", "Qwen2.5"):
        with pytest.raises(UserError, match="is no directory: name one that holds config"):
            find_model(name)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file: name the directory"):
        find_model(str(tmp_path / "file"))

    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(models)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("Qwen/Qwen2.5-0.5B") == models
    assert asked["name"] == "Qwen/Qwen2.5-0.5B"
    assert "*.safetensors" in asked["patterns"]

    def fail(name, allow_patterns):
        raise OSError("no\nroute to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"cannot be downloaded \(no route to host\)"):
        find_model("Qwen/Qwen2.5-0.5B")
