"""The decoder that every example trains: the architecture of Qwen2 and LLaMA, in Flax NNX.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, with the names and conventions of
the Hugging Face checkpoints, except that a projection is a Flax kernel ``(in, out)`` and that the
layers are stacked: every leaf below ``layers`` has a leading axis, over which one layer is scanned.

A module is convenient to write; a pure function is convenient to differentiate, shard and donate.
`functional` turns the one into the other. Parameters are then nested dicts of arrays, for instance
``params["layers"]["self_attn"]["q_proj"]["kernel"]``.

  >>> init, apply = functional(DecoderConfig.tiny())
  >>> params = init(jax.random.key(0))
  >>> apply(params, jnp.zeros((1, 16), jnp.int32)).shape
  (1, 16, 256)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Fields are named as in a Hugging Face ``config.json``.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU feed-forward layer.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, each shared by a group of query heads.
        head_dim: width of a head; ``None`` means ``hidden_size / num_attention_heads``.
        max_position_embeddings: the longest sequence that `Decoder` accepts.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square in every norm.
        tie_word_embeddings: read the logits off with the embedding instead of an ``lm_head``.
        attention_bias: biases on the query, key and value projections, as in Qwen2.
        remat: keep only the layer boundaries for the backward pass, and recompute the rest.
        param_dtype: what the parameters are stored in.
        dtype: what the layers compute in, apart from norm statistics, rotations, softmax and
            logits, which are float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    remat: bool = False
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every key-value head serves the "
                "same number of query heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}; change one of them or set "
                "head_dim"
            )
        if self.resolved_head_dim < 2 or self.resolved_head_dim % 2:
            raise ValueError(
                f"head_dim={self.resolved_head_dim} must be even and positive: rotary positions "
                "turn pairs of channels"
            )
        for name in ("param_dtype", "dtype"):
            if not jnp.issubdtype(getattr(self, name), jnp.floating):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a floating-point type")

    @property
    def resolved_head_dim(self) -> int:
        """The width of a head, derived where ``head_dim`` is ``None``."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def tiny(cls, **changes: Any) -> "DecoderConfig":
        """0.8 million parameters that read bytes: trains in a minute or two on a laptop."""
        sizes: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
        return cls(**(sizes | changes))

    @classmethod
    def qwen2_0_5b(cls, **changes: Any) -> "DecoderConfig":
        """Qwen2-0.5B and Qwen2.5-0.5B."""
        sizes: dict[str, Any] = {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "remat": True,
        }
        return cls(**(sizes | changes))

    @classmethod
    def llama2_7b(cls, **changes: Any) -> "DecoderConfig":
        """LLaMA-2-7B, the size that papers on low-rank optimizers report."""
        sizes: dict[str, Any] = {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "remat": True,
        }
        return cls(**(sizes | changes))


def _linear(
    config: DecoderConfig, inputs: int, outputs: int, *, use_bias: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


class RMSNorm(nnx.Module):
    """Divides by the root mean square in float32, then scales in the input's type, as HF does."""

    def __init__(self, config: DecoderConfig):
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), config.param_dtype))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return jnp.expand_dims(scale, range(x.ndim - 1)) * y.astype(x.dtype)


def rotary_tables(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of shape ``(batch, length, 1, head_dim / 2)`` for ``(batch, length)``."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = jnp.reshape(theta**-exponents, (1, 1, 1, -1))
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns channel ``i`` together with channel ``i + head_dim / 2`` (HF's ``rotate_half``).

    Args:
        x: queries or keys, ``(batch, length, heads, head_dim)``.
        tables: from `rotary_tables`.

    Returns:
        The rotated array, in the type of ``x``.
    """
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention in which consecutive query heads share one key-value head.

    Args:
        q: ``(batch, length, heads, head_dim)``.
        k: ``(batch, length, key_value_heads, head_dim)``.
        v: as ``k``.

    Returns:
        An array like ``q``. Scores and softmax are float32.
    """
    length, heads, shared = q.shape[1], q.shape[2], k.shape[2]
    q = jnp.reshape(q, (*q.shape[:2], shared, heads // shared, q.shape[3]))
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores).astype(v.dtype), v)
    return jnp.reshape(mixed, (*mixed.shape[:2], heads, -1))


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        queries = config.num_attention_heads * config.resolved_head_dim
        keys = config.num_key_value_heads * config.resolved_head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = _linear(config, width, queries, use_bias=bias, rngs=rngs)
        self.k_proj = _linear(config, width, keys, use_bias=bias, rngs=rngs)
        self.v_proj = _linear(config, width, keys, use_bias=bias, rngs=rngs)
        self.o_proj = _linear(config, queries, width, rngs=rngs)
        self.head_dim = config.resolved_head_dim

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Mixes positions: ``(batch, length, hidden_size)`` in and out."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = rotate(jnp.reshape(self.q_proj(x), heads), tables)
        k = rotate(jnp.reshape(self.k_proj(x), heads), tables)
        v = jnp.reshape(self.v_proj(x), heads)
        mixed = causal_attention(q, k, v)
        return self.o_proj(jnp.reshape(mixed, (*x.shape[:-1], -1)))


class MLP(nnx.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(config, width, inner, rngs=rngs)
        self.up_proj = _linear(config, width, inner, rngs=rngs)
        self.down_proj = _linear(config, inner, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Works on every position alone."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """One step of the residual stream, with the `rotary_tables` of its positions."""
        x = x + self.self_attn(self.input_layernorm(x), tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Token ids in, next-token logits out.

    Args:
        config: the shape.
        rngs: random streams for the initial parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.layers = stack(rngs)
        self.norm = RMSNorm(config)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config, config.hidden_size, config.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Computes the logits of every next token.

        Args:
            tokens: token ids, ``(batch, length)``. A token sees itself and what stands before it.
            positions: rotary positions of the same shape; ``None`` counts from 0.

        Returns:
            float32 logits, ``(batch, length, vocab_size)``.
        """
        config = self.config
        if tokens.ndim != 2 or tokens.shape[1] > config.max_position_embeddings:
            raise ValueError(
                f"tokens have shape {tokens.shape}, expected (batch, length) with length at most "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        tables = rotary_tables(positions, config.resolved_head_dim, config.rope_theta)

        structure, stacked = nnx.split(self.layers)

        def layer(x: jax.Array, one: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(structure, one)(x, tables), None

        if config.remat:
            layer = jax.checkpoint(layer, prevent_cse=False)  # scan already keeps them apart
        x, _ = jax.lax.scan(layer, self.embed_tokens(tokens), stacked)
        x = self.norm(x)

        if config.tie_word_embeddings:
            head, equation = self.embed_tokens.embedding, "btd,vd->btv"
        else:
            head, equation = self.lm_head.kernel, "btd,dv->btv"
        return jnp.einsum(
            equation, x, head[...].astype(x.dtype), preferred_element_type=jnp.float32
        )


def functional(
    config: DecoderConfig,
) -> tuple[Callable[[jax.Array], Params], Callable[..., jax.Array]]:
    """A `Decoder` as two pure functions.

    Args:
        config: the shape.

    Returns:
        ``init(key) -> params`` and ``apply(params, tokens, positions=None) -> logits``. Both may be
        jitted, and ``jax.eval_shape(init, key)`` gives the shapes of a model that fits nowhere.
    """

    def build(rngs: nnx.Rngs) -> Decoder:
        return Decoder(config, rngs=rngs)

    structure, _ = nnx.split(nnx.eval_shape(build, nnx.Rngs(0)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(build(nnx.Rngs(key)), nnx.Param)[1])

    def apply(params: Params, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        return nnx.merge(structure, params)(tokens, positions)

    return init, apply


def next_token_loss(
    logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """The mean cross entropy, in nats a token.

    Args:
        logits: ``(batch, length, vocab)``.
        targets: the token that follows each position, ``(batch, length)``.
        mask: which positions count, ``(batch, length)``; ``None`` counts all.

    Returns:
        A scalar; 0 where the mask is empty.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if mask is None:
        return jnp.mean(losses)
    weights = mask.astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)
