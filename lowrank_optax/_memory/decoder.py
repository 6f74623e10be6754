"""One training step of a :class:`ModelShape`, to be compiled and never run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowrank_optax._arrays.tree import OptState, Params
from lowrank_optax._checks import choose
from lowrank_optax._matrix_free.value_and_grad import compact_value_and_grad
from lowrank_optax._memory.models import ModelShape
from lowrank_optax._optimizers.galore import galore_adamw

BATCH_AXES = ("data", "fsdp")

# Name -> whether its gradients are made without full ones.
OPTIMIZERS = {"adamw": False, "galore": False, "matrix-free": True, "sgd": False}


def make_optimizer(name: str, rank: int | float) -> tuple[optax.GradientTransformation, bool]:
    """An optimizer by name, and whether it takes compact gradients."""
    choose("optimizer", name, OPTIMIZERS)
    if name == "adamw":
        tx = optax.adamw(1e-4)
    elif name == "sgd":
        tx = optax.sgd(1e-4)
    else:
        tx = galore_adamw(1e-3, rank)
    return tx, OPTIMIZERS[name]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on ``(batch, length, heads, head)``."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def make_loss(
    model: ModelShape, mesh: Mesh, remat: bool
) -> Callable[[Params, jax.Array], jax.Array]:
    """``loss(params, tokens)``: next-token cross entropy, layers scanned.

    Attention is plain, with its float32 scores; no fused kernel is assumed.
    """

    def on_batch(x: jax.Array) -> jax.Array:
        axes = tuple(name for name in BATCH_AXES if name in mesh.axis_names)
        if mesh.size == 1 or not axes:
            return x
        spec = PartitionSpec(axes, *[None] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def linear(x: jax.Array, w: Params) -> jax.Array:
        y = x @ w["kernel"]
        return y + w["bias"] if "bias" in w else y

    def attention(x: jax.Array, w: Params) -> jax.Array:
        groups = model.heads // model.kv_heads
        heads = (*x.shape[:2], -1, model.head_width)
        q, k, v = (linear(x, w[name]).reshape(heads) for name in ("q_proj", "k_proj", "v_proj"))
        q = _rotate(q).reshape(*x.shape[:2], model.kv_heads, groups, model.head_width)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, _rotate(k)).astype(jnp.float32)
        visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(visible, scores * model.head_width**-0.5, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v)
        return linear(mixed.reshape(*x.shape[:2], -1), w["o_proj"])

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        x = on_batch(x)
        x = x + attention(_norm(x, w["input_layernorm"]["scale"]), w["self_attn"])
        h, mlp = _norm(x, w["post_attention_layernorm"]["scale"]), w["mlp"]
        gated = jax.nn.silu(linear(h, mlp["gate_proj"])) * linear(h, mlp["up_proj"])
        return on_batch(x + linear(gated, mlp["down_proj"])), None

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        embedding = params["embed_tokens"]["embedding"]
        x = on_batch(embedding[tokens])
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        x = _norm(x, params["norm"]["scale"])
        head = embedding.T if model.tied else params["lm_head"]["kernel"]
        logits = (x @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return loss


def make_step(
    loss: Callable[[Params, jax.Array], jax.Array],
    tx: optax.GradientTransformation,
    matrix_free: bool,
) -> Callable[[Params, OptState, jax.Array], tuple[Params, OptState, jax.Array]]:
    """``step(params, opt_state, tokens) -> params, opt_state, loss``."""
    update = optax.with_extra_args_support(tx).update
    full, compact = jax.value_and_grad(loss), compact_value_and_grad(loss)

    def step(
        params: Params, opt_state: OptState, tokens: jax.Array
    ) -> tuple[Params, OptState, jax.Array]:
        if matrix_free:
            value, grads, bases = compact(params, tokens, opt_state=opt_state)
            updates, opt_state = update(grads, opt_state, params, bases=bases)
        else:
            value, grads = full(params, tokens)
            updates, opt_state = update(grads, opt_state, params)
        new: Any = optax.apply_updates(params, updates)
        return new, opt_state, value

    return step
