"""What low-rank optimizers are compared with: other ways to compress gradients or moments.

Both are optax transformations of plain trees of float32 arrays.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

FP8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(FP8).max)
_SMALLEST = float(jnp.finfo(FP8).smallest_subnormal)


class Blocks(NamedTuple):
    """An array in float8 blocks, each with a scale of its own.

    Attributes:
        codes: float8, ``(blocks, block)``; the last block is filled up with zeros.
        scales: float32, ``(blocks, 1)``.
    """

    codes: jax.Array
    scales: jax.Array


def quantize(x: jax.Array, block: int, key: jax.Array) -> Blocks:
    """Rounds to float8 by chance, up or down, so that the mean is right.

    Rounding to nearest would never let a slow average move: it changes by 0.1 % a step, and
    float8_e4m3fn has steps of 6 to 12 %.

    Args:
        x: float32.
        block: entries that share a scale.
        key: of the chances.

    Returns:
        The blocks; what is not 0 does not become 0.
    """
    flat = jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
    scales = jnp.maximum(jnp.max(jnp.abs(flat), axis=1, keepdims=True), 1e-30) / _LARGEST
    scaled = flat / scales
    # Three bits after the leading one, down to the smallest normal number, 2**-6.
    exponent = jnp.maximum(jnp.floor(jnp.log2(jnp.maximum(jnp.abs(scaled), _SMALLEST))), -6.0)
    step = jnp.exp2(exponent - 3.0)
    multiples = jnp.floor(jnp.abs(scaled) / step + jax.random.uniform(key, scaled.shape))
    bounded = jnp.clip(multiples * step, _SMALLEST, _LARGEST)
    codes = jnp.where(scaled == 0, 0.0, jnp.sign(scaled) * bounded)
    return Blocks(codes.astype(FP8), scales)


def dequantize(blocks: Blocks, shape: tuple[int, ...]) -> jax.Array:
    """The float32 array of a shape that the blocks stand for."""
    flat = (blocks.codes.astype(jnp.float32) * blocks.scales).reshape(-1)
    size = functools.reduce(lambda a, b: a * b, shape, 1)
    return flat[:size].reshape(shape)


class AdamFp8State(NamedTuple):
    """State of :func:`scale_by_adam_fp8`: trees of :class:`Blocks`.

    Attributes:
        count: int32 scalar.
        mu: the first moment.
        root: the root of the second moment, which has half the orders of magnitude.
    """

    count: jax.Array
    mu: Any
    root: Any


def _is_blocks(x: Any) -> bool:
    return isinstance(x, Blocks)


def moments(state: AdamFp8State, like: Any) -> tuple[Any, Any]:
    """The two moments in float32, in the shapes of ``like``."""

    def whole(tree: Any) -> Any:
        return jax.tree.map(
            lambda x, blocks: dequantize(blocks, x.shape), like, tree, is_leaf=_is_blocks
        )

    return whole(state.mu), jax.tree.map(jnp.square, whole(state.root))


def next_moments(grads: Any, state: AdamFp8State, b1: float, b2: float) -> tuple[Any, Any]:
    """The moments after one more gradient, before they are rounded."""
    mu, nu = moments(state, grads)
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), nu, grads)
    return mu, nu


def scale_by_adam_fp8(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, block: int = 128, seed: int = 0
) -> optax.GradientTransformation:
    """Adam whose moments are stored in float8_e4m3fn with a float32 scale for each block.

    Args:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        block: entries that share a scale.
        seed: of the roundings.

    Returns:
        The transformation.
    """

    def store(tree: Any, count: jax.Array, salt: int) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), salt), count)
        keys = jax.random.split(key, len(leaves))
        pairs = zip(leaves, keys, strict=True)
        return jax.tree.unflatten(treedef, [quantize(x, block, one) for x, one in pairs])

    def init_fn(params: Any) -> AdamFp8State:
        zero = jnp.zeros([], jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamFp8State(zero, store(zeros, zero, 0), store(zeros, zero, 1))

    def update_fn(updates: Any, state: AdamFp8State, params: Any = None) -> Any:
        del params
        count: Any = optax.safe_increment(state.count)
        mu, nu = next_moments(updates, state, b1, b2)
        first, second = 1 - b1**count, 1 - b2**count
        scaled = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        root = jax.tree.map(jnp.sqrt, nu)
        return scaled, AdamFp8State(count, store(mu, count, 0), store(root, count, 1))

    return optax.GradientTransformation(init_fn, update_fn)


class TopKState(NamedTuple):
    """State of :func:`sparsify_top_k`.

    Attributes:
        residual: what was left out so far, a tree like params; None without error feedback.
    """

    residual: Any


def _keep_largest(x: jax.Array, share: float) -> jax.Array:
    count = max(1, round(share * x.size))
    threshold = jax.lax.top_k(jnp.abs(x).reshape(-1), count)[0][-1]
    return jnp.where(jnp.abs(x) >= threshold, x, 0.0)


def sparsify_top_k(share: float, error_feedback: bool) -> optax.GradientTransformation:
    """Keeps the entries of each gradient that are largest in magnitude.

    Args:
        share: of the entries of each leaf.
        error_feedback: whether what is left out is added to the next gradient.

    Returns:
        The transformation.

    References:
        Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018
    """

    def init_fn(params: Any) -> TopKState:
        return TopKState(jax.tree.map(jnp.zeros_like, params) if error_feedback else None)

    def update_fn(updates: Any, state: TopKState, params: Any = None) -> Any:
        del params
        if error_feedback:
            updates = jax.tree.map(jnp.add, updates, state.residual)
        sparse = jax.tree.map(lambda x: _keep_largest(x, share), updates)
        residual = jax.tree.map(jnp.subtract, updates, sparse) if error_feedback else None
        return sparse, TopKState(residual)

    return optax.GradientTransformation(init_fn, update_fn)
