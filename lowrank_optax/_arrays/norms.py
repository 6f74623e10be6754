"""Norms whose squares neither overflow nor vanish."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype


def norm(x: Float[Array, "..."], axes: Sequence[int]) -> Float[Array, "..."]:
    """Norms over some axes, which are kept; squares neither overflow nor vanish."""
    x = x.astype(wide_dtype(x))
    largest = jnp.max(jnp.abs(x))
    unit = jnp.where(largest > jnp.finfo(x.dtype).tiny, largest, 1)
    return unit * jnp.sqrt(jnp.sum(jnp.square(x / unit), axis=tuple(axes), keepdims=True))
