"""Tensor contractions and factorizations that know about meshes.

Everything in this library that multiplies large arrays goes through
:func:`contract`, so that the two things that are easy to get wrong are decided in
one place: the accumulation precision, and the sharding of a result whose contracted
axis lives on a mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lowrank_optax._arrays.mesh import (
    Names,
    explicit_mesh,
    explicit_names,
    spec_of,
)

Array = jax.Array
_Result = TypeVar("_Result")

# Projections and lifts run at every step. HIGH is three bfloat16 passes on a TPU and TF32 on
# a GPU: close to float32, at a cost that stays small beside the model's own products.
STEP_PRECISION = jax.lax.Precision.HIGH
# Orthonormality to float32 needs float32 products; they run at a refresh only.
REFRESH_PRECISION = jax.lax.Precision.HIGHEST
# How many bfloat16 terms stand for a float32 number: 16 bits of it, or all 24.
_TERMS = {STEP_PRECISION: 2, REFRESH_PRECISION: 3}


def wide_dtype(*operands: Any) -> jnp.dtype:
    """The dtype to compute in: float32, or float64 if one of the arrays or dtypes is that.

    JAX's own ``result_type`` refuses to widen under strict promotion.
    """
    double = any(jnp.dtype(getattr(x, "dtype", x)) == jnp.float64 for x in operands)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def contract(
    subscripts: str,
    *operands: Array,
    precision: jax.lax.Precision = STEP_PRECISION,
) -> Array:
    """``jnp.einsum`` in (at least) float32, for operands that a mesh may have sharded.

    Sums over a sharded axis are completed here: with Explicit axes the result keeps the
    mesh axes of the labels that survive, and the contracted ones are all-reduced. The larger
    operand stays where it is, and the smaller one comes to it.

    Args:
        subscripts: an explicit einsum string such as ``"ab,ac->bc"``.
        *operands: one or two arrays, in any floating dtypes.
        precision: precision of the products.

    Returns:
        The contraction, in float32 or the widest operand dtype if that is wider.
    """
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return _wide_einsum(subscripts, operands, precision)
    inputs, output = subscripts.split("->")
    pairs = list(zip(inputs.split(","), operands, strict=True))
    # Each label is on the same mesh axes wherever it stands, and each mesh axis on one label.
    where: dict[str, Names] = {}
    used: set[str] = set()
    for labels, x in sorted(pairs, key=lambda pair: -pair[1].size):
        for label, names in zip(labels, explicit_names(x) or [()] * x.ndim, strict=True):
            if label not in where:
                where[label] = tuple(name for name in names if name not in used)
                used.update(names)

    def placed(labels: str) -> NamedSharding:
        return NamedSharding(mesh, spec_of([where[label] for label in labels]))

    aligned = [jax.sharding.reshard(x, placed(labels)) for labels, x in pairs]
    return _wide_einsum(subscripts, aligned, precision, out_sharding=placed(output))


def _wide_einsum(
    subscripts: str, operands: Sequence[Array], precision: jax.lax.Precision, **kwargs: Any
) -> Array:
    """An einsum in (at least) float32 that makes no float32 copy of a bfloat16 operand.

    A float32 array is a sum of bfloat16 ones, and products of bfloat16 numbers are exact in
    float32. So where a weight or a gradient in bfloat16 meets a float32 basis, the thin basis is
    split, and not the large array widened.
    """
    dtype = wide_dtype(*operands)
    narrow = [x.dtype == jnp.bfloat16 for x in operands]

    def widened(*operands: Array) -> Array:
        wide = [x.astype(dtype) for x in operands]
        return jnp.einsum(subscripts, *wide, precision=precision, **kwargs)

    if len(operands) == 2 and narrow[0] != narrow[1] and dtype == jnp.float32:

        def in_terms(*operands: Array) -> Any:
            rest = operands[narrow.index(False)].astype(dtype)
            total: Any = 0.0
            for _ in range(_TERMS[precision]):
                part = rest.astype(jnp.bfloat16)
                rest = rest - part.astype(dtype)
                pair = (operands[0], part) if narrow[0] else (part, operands[1])
                product = jnp.einsum(subscripts, *pair, preferred_element_type=dtype, **kwargs)
                total = total + product
            return total

        # A CPU multiplies no bfloat16 numbers, and widens them in any case.
        return jax.lax.platform_dependent(*operands, cpu=widened, default=in_terms)
    return widened(*operands)


def on_replicated(fn: Callable[[Array], _Result], x: Array) -> _Result:
    """Applies a factorization to a small array, replicated on every device first.

    JAX refuses to factorize sharded operands on Explicit axes; the arrays that this
    library factorizes are rank by rank, so a copy on each device costs nothing.
    """
    mesh = explicit_mesh(x)
    if mesh is not None:
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))
    return fn(x)
