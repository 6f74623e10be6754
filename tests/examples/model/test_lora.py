"""LoRA projections: frozen kernels, adapters beside them, GaLore on the rest."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowrank_optax as lro
from model import lora
from model.decoder import DecoderConfig, functional, next_token_loss
from running import training

pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")

CONFIG = DecoderConfig.tiny(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention_bias=True,
    lora_ranks=lora.parse_ranks(["attention=3"]),
    lora_alpha=6.0,
)
PLAIN = dataclasses.replace(CONFIG, lora_ranks=())


@pytest.fixture(scope="module")
def params() -> Any:
    """With adapters that are not zero."""
    init, _ = functional(CONFIG)
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(generator.normal(0.0, 0.2, x.shape), x.dtype),
        jax.eval_shape(init, jax.random.key(0)),
    )


@pytest.fixture(scope="module")
def apply():
    return jax.jit(functional(CONFIG)[1])


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 40, (4, 13)), jnp.int32)


def loss_fn(trained, batch, frozen):
    logits = functional(CONFIG)[1](lora.join(trained, frozen), batch[:, :-1])
    return next_token_loss(logits, batch[:, 1:])


def make_optimizer(trained):
    galore = lro.galore_adamw(1e-2, rank=4, refresh_every=2)
    parts = {"lora": optax.adamw(1e-2), "rest": galore}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(parts, lora.label(trained)))


def paths(tree) -> set[str]:
    return {
        "/".join(entry.key for entry in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def test_ranks():
    assert lora.parse_ranks([]) == ()
    assert dict(lora.parse_ranks(["mlp=2", "q_proj=8"])) == {
        "gate_proj": 2,
        "up_proj": 2,
        "down_proj": 2,
        "q_proj": 8,
    }
    for text in ("attention", "attention=0", "attention=-1", "attention=1.5", "atention=8", "=8"):
        with pytest.raises(ValueError, match=f"{text} is not NAME=RANK, where NAME is one of att"):
            lora.parse_ranks([text])
    with pytest.raises(ValueError, match="q_proj=8 gives q_proj a rank a second time"):
        lora.parse_ranks(["attention=4", "q_proj=8"])


def test_adapters_start_out_as_nothing(params, tokens):
    init, apply = functional(CONFIG)
    fresh = jax.jit(init)(jax.random.key(0))
    adapter = fresh["layers"]["self_attn"]["q_proj"]
    assert not jnp.any(adapter["lora_b"])
    np.testing.assert_allclose(jnp.std(adapter["lora_a"]), 32**-0.5, rtol=0.3)
    _, plain = functional(PLAIN)
    np.testing.assert_allclose(
        jax.jit(apply)(fresh, tokens), jax.jit(plain)(lora.merge(fresh, 6.0), tokens), atol=1e-5
    )


def test_merging_keeps_the_logits(params, apply, tokens):
    merged = lora.merge(params, CONFIG.lora_alpha)
    init, plain = functional(PLAIN)
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, shapes)
    before = apply(params, tokens)
    np.testing.assert_allclose(jax.jit(plain)(merged, tokens), before, atol=2e-4)
    without = jax.jit(plain)(lora.merge(params, 0.0), tokens)
    assert not np.allclose(without, before, atol=0.01)


def test_splitting_and_joining(params):
    trained, frozen = lora.split(params)
    assert paths(frozen) == {f"layers/self_attn/{name}_proj/kernel" for name in "qkvo"}
    assert paths(trained) | paths(frozen) == paths(params)
    assert not paths(trained) & paths(frozen)
    jax.tree.map(np.testing.assert_array_equal, lora.join(trained, frozen), params)
    labels = jax.tree_util.tree_flatten_with_path(lora.label(trained))[0]
    adapters = {path[-1].key for path, label in labels if label == "lora"}
    assert adapters == {"lora_a", "lora_b"}
    init, _ = functional(PLAIN)
    plain = jax.eval_shape(init, jax.random.key(0))
    assert lora.split(plain) == (plain, {})
    assert lora.merge(plain, 1.0) == plain


@pytest.mark.parametrize("matrix_free", [False, True])
def test_adapters_by_adamw_and_the_rest_in_a_subspace(params, tokens, matrix_free):
    trained, frozen = lora.split(params)
    before = jax.tree.map(np.asarray, (trained, frozen))
    tx = make_optimizer(trained)
    state = tx.init(trained)
    text = str(lro.describe(tx, trained))
    assert "layers/mlp/up_proj/kernel" in text
    assert "q_proj/kernel" not in text
    make = training.compact_gradients if matrix_free else training.full_gradients
    step = training.make_train_step(make(loss_fn, 2), tx)
    trained = jax.tree.map(jnp.copy, trained)  # the step takes the memory
    losses = []
    for _ in range(5):
        trained, state, metrics = step(trained, state, tokens, frozen)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, frozen, before[1])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), trained, before[0])
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("qtype", "error"), [("int8", 0.02), ("int4", 0.3), ("nf4", 0.3)])
def test_a_quantised_base(params, apply, tokens, qtype, error):
    pytest.importorskip("qwix", reason="the qwix extra")
    trained, frozen = lora.split(params)
    quantised = lora.quantize(frozen, qtype, tile=16)
    assert training.count_bytes(quantised) < 0.4 * training.count_bytes(frozen)
    exact, ours = apply(params, tokens), apply(lora.join(trained, quantised), tokens)
    assert 0 < np.linalg.norm(ours - exact) < error * np.linalg.norm(exact)
    # What is exported is what was trained against.
    merged = lora.merge(lora.join(trained, quantised), CONFIG.lora_alpha)
    plain = jax.jit(functional(PLAIN)[1])
    np.testing.assert_allclose(plain(merged, tokens), ours, atol=2e-4)
    if qtype == "int8":
        tx = make_optimizer(trained)
        state = tx.init(trained)
        step = training.make_train_step(training.compact_gradients(loss_fn), tx)
        trained = jax.tree.map(jnp.copy, trained)
        losses = []
        for _ in range(4):
            trained, state, metrics = step(trained, state, tokens, quantised)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix's use of Flax
def test_a_model_that_qwix_adapted(tokens):
    """Of an unscanned module, qwix's own adapters and quantised weights do as well as ours."""
    qwix = pytest.importorskip("qwix", reason="the qwix extra")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.Linear(32, 32, rngs=rngs)
            self.mlp = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.mlp(jax.nn.gelu(self.attention(x)))

    x = jax.random.normal(jax.random.key(0), (8, 32))
    provider = qwix.LoraProvider(module_path="attention", rank=4, alpha=8, weight_qtype="int8")
    model = Model(nnx.Rngs(0))
    model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))

    def is_trained(path, variable):
        return isinstance(variable, nnx.LoRAParam) or "mlp" in path

    structure, state, frozen = nnx.split(model, is_trained, ...)
    assert any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(frozen))
    params = nnx.to_pure_dict(state)
    labels = {"attention": "lora", "mlp": "rest"}
    parts = {"lora": optax.adamw(1e-2), "rest": lro.galore_adamw(1e-2, rank=4)}
    tx = optax.partition(parts, labels)
    opt_state = tx.init(params)
    assert "4" in str(lro.describe(tx, params)).split("mlp/kernel")[1].splitlines()[0]

    def loss(params, x, frozen):
        return jnp.mean((nnx.merge(structure, params, frozen)(x) - 1) ** 2)

    step = training.make_train_step(training.compact_gradients(loss), tx)
    losses = []
    for _ in range(4):
        params, opt_state, metrics = step(params, opt_state, x, frozen)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_a_missing_qwix_is_named(params, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"--quantize needs qwix: pip install 'lowrank-optax\[q"):
        lora.quantize(lora.split(params)[1], "int8")
