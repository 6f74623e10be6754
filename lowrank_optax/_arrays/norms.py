"""Norms whose squares neither overflow nor vanish: the one place that knows how."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype


def unit(x: Float[Array, "..."], axes: Sequence[int] | None = None) -> Float[Array, "..."]:
    """A positive number to divide by, after which the largest entry is 1.

    Args:
        x: any finite numbers.
        axes: what has one such number; None for the whole array.

    Returns:
        The largest absolute value over ``axes``, which are kept with length 1; 1 where that is zero
        or so small that it has no reciprocal in its dtype.
    """
    axes = None if axes is None else tuple(axes)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=axes is not None)
    return jnp.where(largest > jnp.finfo(largest.dtype).tiny * 4, largest, 1)


def norm(x: Float[Array, "..."], axes: Sequence[int] | None = None) -> Float[Array, "..."]:
    """Norms over some axes, which are kept with length 1; of the whole array if None."""
    x = x.astype(wide_dtype(x))
    scale = unit(x, axes)
    axes = None if axes is None else tuple(axes)
    squares = jnp.sum(jnp.square(x / scale), axis=axes, keepdims=axes is not None)
    return scale * jnp.sqrt(squares)
