"""The decoder that every example trains: the architecture of Qwen2, Qwen3 and LLaMA, in Flax NNX.

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

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from model.config import DecoderConfig as DecoderConfig
from model.lora import LoraLinear
from model.rotary import rotary_tables, rotate

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays."""


def _linear(
    config: DecoderConfig,
    inputs: int,
    outputs: int,
    *,
    name: str,
    use_bias: bool = False,
    rngs: nnx.Rngs,
) -> nnx.Module:
    dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    rank = dict(config.lora_ranks).get(name)
    if rank is None:
        return nnx.Linear(inputs, outputs, use_bias=use_bias, **dtypes, rngs=rngs)
    return LoraLinear(
        inputs,
        outputs,
        rank=rank,
        alpha=config.lora_alpha,
        use_bias=use_bias,
        **dtypes,
        rngs=rngs,
    )


class RMSNorm(nnx.Module):
    """Divides by the root mean square in float32, then scales in the input's type, as HF does."""

    def __init__(self, config: DecoderConfig, width: int | None = None):
        self.scale = nnx.Param(jnp.ones((width or config.hidden_size,), config.param_dtype))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return jnp.expand_dims(scale, range(x.ndim - 1)) * y.astype(x.dtype)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """Softmax attention in which consecutive query heads share one key-value head.

    Args:
        q: ``(batch, length, heads, head_dim)``.
        k: ``(batch, length, key_value_heads, head_dim)``.
        v: as ``k``.
        segments: ``(batch, length)``, whole numbers; a position sees those of its own segment
            only. ``None`` means that a row is one segment.

    Returns:
        An array like ``q``. Scores and softmax are float32.
    """
    length, heads, shared = q.shape[1], q.shape[2], k.shape[2]
    q = jnp.reshape(q, (*q.shape[:2], shared, heads // shared, q.shape[3]))
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    if segments is not None:
        same = segments[:, :, None] == segments[:, None, :]
        visible = visible & same[:, None, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores).astype(v.dtype), v)
    return jnp.reshape(mixed, (*mixed.shape[:2], heads, -1))


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        queries = config.num_attention_heads * config.resolved_head_dim
        keys = config.num_key_value_heads * config.resolved_head_dim
        width, bias = config.hidden_size, config.attention_bias

        def linear(name: str, inputs: int, outputs: int, use_bias: bool = False) -> Any:
            return _linear(config, inputs, outputs, name=name, use_bias=use_bias, rngs=rngs)

        self.q_proj = linear("q_proj", width, queries, use_bias=bias)
        self.k_proj = linear("k_proj", width, keys, use_bias=bias)
        self.v_proj = linear("v_proj", width, keys, use_bias=bias)
        self.o_proj = linear("o_proj", queries, width)
        self.head_dim = config.resolved_head_dim
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config, config.resolved_head_dim)
            self.k_norm = RMSNorm(config, config.resolved_head_dim)

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Mixes positions: ``(batch, length, hidden_size)`` in and out."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = jnp.reshape(self.q_proj(x), heads)
        k = jnp.reshape(self.k_proj(x), heads)
        v = jnp.reshape(self.v_proj(x), heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = causal_attention(rotate(q, tables), rotate(k, tables), v, segments)
        return self.o_proj(jnp.reshape(mixed, (*x.shape[:-1], -1)))


class MLP(nnx.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, inputs: int, outputs: int) -> Any:
            return _linear(config, inputs, outputs, name=name, rngs=rngs)

        self.gate_proj = linear("gate_proj", width, inner)
        self.up_proj = linear("up_proj", width, inner)
        self.down_proj = linear("down_proj", inner, width)

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

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """One step of the residual stream, with the `rotary_tables` of its positions."""
        x = x + self.self_attn(self.input_layernorm(x), tables, segments)
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
            self.lm_head: Any = _linear(
                config, config.hidden_size, config.vocab_size, name="lm_head", rngs=rngs
            )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the logits of every next token.

        Args:
            tokens: token ids, ``(batch, length)``. A token sees itself and what stands before it.
            positions: rotary positions of the same shape; ``None`` counts from 0.
            segments: which of several packed texts a token belongs to, whole numbers of the same
                shape; tokens see their own text only. ``None`` means one text a row.

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
        tables = rotary_tables(
            positions, config.resolved_head_dim, config.rope_theta, config.rope_scaling
        )

        structure, stacked = nnx.split(self.layers)

        def layer(x: jax.Array, one: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(structure, one)(x, tables, segments), None

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
        ``init(key) -> params`` and ``apply(params, tokens, positions=None, segments=None) ->
        logits``. Both may be jitted, and ``jax.eval_shape(init, key)`` gives the shapes of a model
        that fits nowhere.
    """

    def build(rngs: nnx.Rngs) -> Decoder:
        return Decoder(config, rngs=rngs)

    structure, _ = nnx.split(nnx.eval_shape(build, nnx.Rngs(0)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(build(nnx.Rngs(key)), nnx.Param)[1])

    def apply(
        params: Params,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        return nnx.merge(structure, params)(tokens, positions, segments)

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
