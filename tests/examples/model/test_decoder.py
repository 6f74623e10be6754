"""The decoder that the examples share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import decoder, rotary
from model.decoder import Decoder, DecoderConfig, functional, next_token_loss

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(**changes) -> DecoderConfig:
    return DecoderConfig(**(SMALL | changes))


@functools.cache
def setup(config: DecoderConfig):
    """Parameters from NumPy (to compile an init takes seconds), a jitted ``apply``, and tokens."""
    init, apply = functional(config)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(generator.normal(0.0, 0.3, x.shape), x.dtype),
        jax.eval_shape(init, jax.random.key(0)),
    )
    tokens = jnp.asarray(generator.integers(0, config.vocab_size, (2, 12)), jnp.int32)
    return params, jax.jit(apply), tokens


def jitted_gradient(apply, tokens):
    return jax.jit(jax.grad(lambda params: next_token_loss(apply(params, tokens), tokens)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "head_dim": 10},
        {"num_key_value_heads": 4, "qk_norm": True},
    ],
    ids=str,
)
def test_shapes_follow_the_config(changes):
    config = small(**changes)
    params, apply, tokens = setup(config)
    logits = apply(params, tokens)
    assert (logits.shape, logits.dtype) == ((2, 12, 50), jnp.float32)
    assert set(params) == {"embed_tokens", "layers", "norm"} | (
        set() if config.tie_word_embeddings else {"lm_head"}
    )
    attention = params["layers"]["self_attn"]
    assert attention["q_proj"]["kernel"].shape == (2, 24, 4 * config.resolved_head_dim)
    assert attention["k_proj"]["kernel"].shape[2] == (
        config.num_key_value_heads * config.resolved_head_dim
    )
    assert ("bias" in attention["v_proj"]) == config.attention_bias
    assert ("q_norm" in attention) == config.qk_norm
    assert "bias" not in attention["o_proj"]
    assert params["layers"]["mlp"]["down_proj"]["kernel"].shape == (2, 40, 24)


def test_layers_start_out_different():
    init, _ = functional(small())
    params = jax.jit(init)(jax.random.key(0))
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])
    np.testing.assert_allclose(jnp.std(kernel), 24**-0.5, rtol=0.1)  # the fan-in of one layer
    np.testing.assert_array_equal(params["layers"]["input_layernorm"]["scale"], 1.0)


@pytest.mark.parametrize("length", [1, 7, 12])
def test_any_length_up_to_the_longest(length):
    params, apply, tokens = setup(small(max_position_embeddings=12))
    whole = apply(params, tokens)
    np.testing.assert_allclose(apply(params, tokens[:, :length]), whole[:, :length], atol=1e-5)


def test_too_long_a_sequence_is_an_error():
    params, apply, tokens = setup(small(max_position_embeddings=11))
    with pytest.raises(ValueError, match=r"\(2, 12\).*at most max_position_embeddings=11"):
        apply(params, tokens)


def test_the_future_does_not_change_the_past():
    params, apply, tokens = setup(small())
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 50)
    before, after = apply(params, tokens), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 8))
    positions = jnp.arange(6)[None]

    def scores(shift: int) -> jax.Array:
        tables = decoder.rotary_tables(positions + shift, 8, 10_000.0)
        return jnp.einsum("bthd,bshd->bhts", decoder.rotate(q, tables), decoder.rotate(k, tables))

    np.testing.assert_allclose(scores(0), scores(37), atol=1e-4)
    still = decoder.rotary_tables(jnp.zeros_like(positions), 8, 10_000.0)
    np.testing.assert_array_equal(decoder.rotate(q, still), q)
    moved = decoder.rotate(q, decoder.rotary_tables(positions, 8, 10_000.0))
    np.testing.assert_allclose(
        jnp.linalg.norm(moved, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5
    )


def test_llama3_stretches_long_wavelengths_only():
    scaling = rotary.RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=64)
    wavelengths = np.array([1.0, 15.9, 24.0, 64.1, 1e6])  # 64 / 4, between, 64 / 1
    stretched = 2 * np.pi / np.asarray(scaling(jnp.asarray(2 * np.pi / wavelengths, jnp.float32)))
    np.testing.assert_allclose(stretched[:2], wavelengths[:2], rtol=1e-5)
    np.testing.assert_allclose(stretched[3:], 8 * wavelengths[3:], rtol=1e-5)
    assert 24 < stretched[2] < 8 * 24
    with pytest.raises(ValueError, match=r"low_freq_factor=4\.0 must be positive and below high"):
        rotary.RopeScaling(8.0, 4.0, 4.0, 64)
    with pytest.raises(ValueError, match=r"factor=0\.5 must be at least 1"):
        rotary.RopeScaling(0.5, 1.0, 4.0, 64)


def test_segments_do_not_see_each_other():
    params, apply, tokens = setup(small(qk_norm=True))
    segments = jnp.array([[1] * 5 + [2] * 7, [1] * 12])
    positions = jnp.array([[*range(5), *range(7)], [*range(12)]])
    packed = apply(params, tokens, positions, segments)
    alone = apply(params, jnp.roll(tokens, -5, axis=1))
    np.testing.assert_allclose(packed[0, 5:], alone[0, :7], atol=1e-5)
    np.testing.assert_allclose(packed[1], apply(params, tokens)[1], atol=1e-5)


def test_a_shift_of_all_positions_leaves_the_logits():
    params, apply, tokens = setup(small())
    positions = jnp.broadcast_to(jnp.arange(12)[None], tokens.shape)
    np.testing.assert_allclose(
        apply(params, tokens, positions + 5), apply(params, tokens), atol=1e-4
    )
    assert not np.allclose(apply(params, tokens, 2 * positions), apply(params, tokens), atol=1e-3)


def test_grouped_heads_equal_repeated_heads():
    grouped = small(num_key_value_heads=2)
    params, apply, tokens = setup(grouped)
    _, apply_repeated, _ = setup(small(num_key_value_heads=4))

    def repeat(kernel: jax.Array) -> jax.Array:
        layers, width, _ = kernel.shape
        heads = jnp.reshape(kernel, (layers, width, 2, grouped.resolved_head_dim))
        return jnp.reshape(jnp.repeat(heads, 2, axis=2), (layers, width, -1))

    repeated = jax.tree.map(lambda x: x, params)
    for name in ("k_proj", "v_proj"):
        projection = repeated["layers"]["self_attn"][name]
        projection["kernel"] = repeat(projection["kernel"])
    np.testing.assert_allclose(apply_repeated(repeated, tokens), apply(params, tokens), atol=1e-5)


def test_tied_embeddings_are_one_array():
    params, apply, tokens = setup(small(tie_word_embeddings=True))
    embedding = params["embed_tokens"]["embedding"]
    assert sum(leaf.size == embedding.size for leaf in jax.tree.leaves(params)) == 1
    # A token that is never read still moves the logits, and has a gradient: it is the head, too.
    unread = int(jnp.setdiff1d(jnp.arange(50), tokens)[0])
    gradient = jitted_gradient(apply, tokens)(params)
    assert jnp.any(gradient["embed_tokens"]["embedding"][unread] != 0)
    # The untied model with the transposed head is the same function.
    untied = params | {"lm_head": {"kernel": embedding.T}}
    _, apply_untied, _ = setup(small())
    np.testing.assert_allclose(apply_untied(untied, tokens), apply(params, tokens), atol=1e-5)


def test_scan_equals_a_loop_over_layers():
    config = small(attention_bias=True, tie_word_embeddings=True)
    params, apply, tokens = setup(config)
    structure, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def unrolled(params, tokens):
        model = nnx.merge(structure, params)
        positions = jnp.broadcast_to(jnp.arange(12)[None], tokens.shape)
        tables = decoder.rotary_tables(positions, config.resolved_head_dim, config.rope_theta)
        layer, stacked = nnx.split(model.layers)
        x = model.embed_tokens(tokens)
        for i in range(config.num_hidden_layers):
            x = nnx.merge(layer, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))(x, tables)
        return model.norm(x) @ model.embed_tokens.embedding[...].T

    np.testing.assert_allclose(apply(params, tokens), unrolled(params, tokens), atol=1e-4)


def test_remat_leaves_the_gradients():
    params, apply, tokens = setup(small())
    _, apply_remat, _ = setup(small(remat=True))

    plain, remat = (jitted_gradient(f, tokens) for f in (apply, apply_remat))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        plain(params),
        remat(params),
    )
    # The same numbers, and indeed by another program.
    assert temporary_bytes(remat, params) < temporary_bytes(plain, params)


def temporary_bytes(function, *args) -> int:
    analysis = function.lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16(param_dtype):
    params, apply, tokens = setup(small(dtype="bfloat16", param_dtype=param_dtype))
    assert all(leaf.dtype == param_dtype for leaf in jax.tree.leaves(params))
    logits = apply(params, tokens)
    assert logits.dtype == jnp.float32
    _, apply_exact, _ = setup(small())
    exact = apply_exact(jax.tree.map(lambda x: x.astype(jnp.float32), params), tokens)
    assert jnp.linalg.norm(logits - exact) < 0.03 * jnp.linalg.norm(exact)
    gradient = jax.eval_shape(jitted_gradient(apply, tokens), params)
    assert all(leaf.dtype == param_dtype for leaf in jax.tree.leaves(gradient))


def test_bfloat16_gradients_are_finite():
    params, apply, tokens = setup(small(dtype="bfloat16", param_dtype="bfloat16"))
    gradient = jitted_gradient(apply, tokens)(params)
    assert all(np.all(np.isfinite(leaf.astype(np.float32))) for leaf in jax.tree.leaves(gradient))


def test_the_loss_is_the_mean_over_the_mask():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.array([[0, 1, 2], [3, 4, 0]])
    picked = jax.nn.one_hot(targets, 5) * jax.nn.log_softmax(logits)
    nats = -np.sum(np.asarray(picked), axis=2)
    np.testing.assert_allclose(next_token_loss(logits, targets), nats.mean(), rtol=1e-6)
    mask = jnp.array([[1, 0, 1], [0, 0, 1]], bool)
    np.testing.assert_allclose(
        next_token_loss(logits, targets, mask), nats[np.asarray(mask)].mean(), rtol=1e-6
    )
    assert next_token_loss(logits, targets, jnp.zeros_like(mask)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_he"),
        ({"hidden_size": 26}, "hidden_size=26 is not a multiple of num_attention_heads=4"),
        ({"hidden_size": 20}, "head_dim=5 must be even"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1 must be at least 1"),
        ({"dtype": "int32"}, "dtype='int32' must be a floating-point type"),
    ],
)
def test_impossible_shapes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (DecoderConfig.tiny(), 820_352),
        (DecoderConfig.qwen2_0_5b(), 494_032_768),
        (DecoderConfig.llama2_7b(), 6_738_415_616),
    ],
    ids=["tiny", "qwen2_0_5b", "llama2_7b"],
)
def test_presets_have_the_published_sizes(config, parameters):
    init, _ = functional(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
