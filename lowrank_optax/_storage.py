"""How bases are stored: as they are, rounded to a narrower float, or in 8 bits.

The columns of a basis have norm 1, so an 8-bit column needs no scale beside it: whatever
integers stand for it, dividing by their norm gives the column back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._view import Bases, View

_LARGEST = 127


def check_dtype(name: str, dtype: Any, *, eight_bits: bool = False) -> jnp.dtype:
    """The dtype of a tracker's bases.

    Args:
        name: the tracker, for the message.
        dtype: what was asked for.
        eight_bits: whether int8 will do.

    Raises:
        ValueError: if it cannot hold a basis.
    """
    dtype = jnp.dtype(dtype)
    if not (jnp.issubdtype(dtype, jnp.floating) or (eight_bits and dtype == jnp.int8)):
        fit = "a float or int8" if eight_bits else "a float"
        raise ValueError(f"{name}: dtype={dtype.name} cannot hold a basis; use {fit}")
    return dtype


def _axes(x: Array, view: View) -> tuple[int, ...]:
    return tuple(range(len(view.batch_axes), x.ndim - 1))


def store(basis: Float[Array, "*rows r"], view: View, dtype: jnp.dtype) -> Array:
    """A basis as it is stored."""
    if dtype != jnp.int8:
        return basis.astype(dtype)
    largest = jnp.max(jnp.abs(basis), axis=_axes(basis, view), keepdims=True)
    return jnp.round(_LARGEST * basis / largest).astype(dtype)


def read(stored: Any, view: View) -> Any:
    """A basis from what is stored; floats stay in their dtype. Of a shape, the basis's shape."""
    if jnp.issubdtype(stored.dtype, jnp.floating):
        return stored
    if isinstance(stored, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stored.shape, jnp.float32, sharding=stored.sharding)
    columns = stored.astype(jnp.float32)
    squares = jnp.sum(jnp.square(columns), axis=_axes(stored, view), keepdims=True)
    return columns / jnp.sqrt(squares)


def store_all(bases: Bases, view: View, like: Bases) -> Bases:
    """The bases of one target in the dtypes of others."""
    return jax.tree.map(lambda b, old: store(b, view, old.dtype), bases, like)


def read_all(stored: Bases, view: View) -> Bases:
    """The bases of one target from what is stored."""
    return jax.tree.map(lambda b: read(b, view), stored)
