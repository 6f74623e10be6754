"""How bases are stored: as they are, rounded to a narrower float, in 8 bits or in 4.

The columns of a basis have norm 1, so a column in whole numbers needs no scale beside it: whatever
integers stand for it, dividing by their norm gives the column back. Of 4-bit columns each byte
holds two, one of the first half of the rank and one of the second.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from lowrank_optax._plan.view import Bases, View

PACKED = jnp.dtype(jnp.uint8)
"""The dtype of two 4-bit columns in one."""

_LARGEST = {jnp.dtype(jnp.int8): 127, PACKED: 7}
# What becomes the largest integer, as a share of a column's largest entry. With few integers it
# pays to cut off the largest entries, as all others then have finer steps: 4096 normal numbers
# come back from 4 bits with an error of 15 % uncut, of 12 % if cut at 0.7 of the largest.
_CLIPPED_AT = (0.9, 0.75, 0.65, 0.4, 0.2)


def check_dtype(name: str, dtype: Any, *, integers: bool = False) -> jnp.dtype:
    """The dtype in which a tracker stores its bases.

    Args:
        name: the tracker, for the message.
        dtype: what was asked for.
        integers: whether int8 and int4 will do.

    Raises:
        TypeError: if it is no dtype.
        ValueError: if it cannot hold a basis.
    """
    fit = "a float, int8 or int4" if integers else "a float"
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name}: dtype={dtype!r} is no dtype; use {fit}") from None
    if integers and dtype == jnp.int4:
        return PACKED
    if not (jnp.issubdtype(dtype, jnp.floating) or (integers and dtype == jnp.int8)):
        raise ValueError(f"{name}: dtype={dtype.name} cannot hold a basis; use {fit}")
    return dtype


def check_rank(path: str, rank: int, dtype: jnp.dtype) -> None:
    """Raises ValueError if a basis of this rank cannot be stored."""
    if dtype == PACKED and rank % 2:
        raise ValueError(
            f"{path!r}: rank {rank} is odd, and dtype=int4 packs two columns into a byte; use an "
            f"even rank, {rank + 1} say, or dtype=int8"
        )


def _axes(x: Array, view: View) -> tuple[int, ...]:
    return tuple(range(len(view.batch_axes), x.ndim - 1))


def _norm(x: Float[Array, "..."], axes: Sequence[int]) -> Float[Array, "..."]:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def _codes(basis: Float[Array, "*rows r"], view: View, largest: int) -> Float[Array, "*rows r"]:
    """Whole numbers up to ``largest`` in the direction of each column."""
    axes = _axes(basis, view)
    step = jnp.max(jnp.abs(basis), axis=axes, keepdims=True) / largest
    codes = jnp.round(basis / step)
    if largest > 7:
        return codes

    def cosine(codes):
        return jnp.sum(codes * basis, axis=axes, keepdims=True) / _norm(codes, axes)

    best = cosine(codes)
    for share in _CLIPPED_AT:
        clipped = jnp.clip(jnp.round(basis / (share * step)), -largest, largest)
        found = cosine(clipped)
        codes = jnp.where(found > best, clipped, codes)
        best = jnp.maximum(found, best)
    return codes


def _pack(codes: Int8[Array, "*rows r"]) -> UInt8[Array, "*rows half"]:
    low, high = jnp.split(jax.lax.bitcast_convert_type(codes, jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def _unpack(packed: UInt8[Array, "*rows half"]) -> Int8[Array, "*rows r"]:
    # Shifting a signed number to the right keeps its sign.
    raised = [jax.lax.bitcast_convert_type(x, jnp.int8) for x in (packed << 4, packed)]
    return jnp.concatenate(raised, axis=-1) >> 4


def store(basis: Float[Array, "*rows r"], view: View, dtype: jnp.dtype) -> Array:
    """A basis as it is stored."""
    if jnp.issubdtype(dtype, jnp.floating):
        return basis.astype(dtype)
    codes = _codes(basis, view, _LARGEST[jnp.dtype(dtype)]).astype(jnp.int8)
    return _pack(codes) if dtype == PACKED else codes


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a basis is stored in 4 bits; :func:`shape_of` undoes it."""
    *rows, columns = shape
    return (*rows, columns // 2)


def shape_of(stored: Any) -> tuple[int, ...]:
    """The shape of a basis, from what is stored."""
    *rows, columns = stored.shape
    return (*rows, 2 * columns if stored.dtype == PACKED else columns)


def read(stored: Any, view: View) -> Any:
    """A basis from what is stored; floats stay in their dtype. Of a shape, the basis's shape."""
    if jnp.issubdtype(stored.dtype, jnp.floating):
        return stored
    if isinstance(stored, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape_of(stored), jnp.float32, sharding=stored.sharding)
    codes = jnp.asarray(stored)  # A state on the host holds NumPy arrays.
    columns = (_unpack(codes) if codes.dtype == PACKED else codes).astype(jnp.float32)
    return columns / _norm(columns, _axes(columns, view))


def store_all(bases: Bases, view: View, like: Bases) -> Bases:
    """The bases of one target in the dtypes of others."""
    return jax.tree.map(lambda b, old: store(b, view, old.dtype), bases, like)


def read_all(stored: Bases, view: View) -> Bases:
    """The bases of one target from what is stored."""
    return jax.tree.map(lambda b: read(b, view), stored)
