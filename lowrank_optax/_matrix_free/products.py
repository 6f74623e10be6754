"""The products of a target's gradient that a compact backward pass makes."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import shard_like
from lowrank_optax._matrix_free.targets import CompactTarget
from lowrank_optax._matrix_free.weight import Factored, Product, ProductAxes
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View

_RANK_AXES = {REDUCTION: -1, OUTPUT: -2}


def product_of(view: View, bases: Bases) -> Product:
    """The product of a leaf's gradient with its bases, as an empty core to differentiate."""
    arrays, names, sides = [], [], []
    for side, basis in zip((REDUCTION, OUTPUT), bases, strict=True):
        if basis is not None:
            arrays.append(basis)
            names.append((*view.batch_axes, *view.side_axes(side), _RANK_AXES[side]))
            sides.append(side)
    core_axes = [*view.batch_axes]
    shape = list(view.batch_shape)
    for side in (REDUCTION, OUTPUT):
        if side in sides:
            core_axes.append(_RANK_AXES[side])
            shape.append(arrays[sides.index(side)].shape[-1])
        else:
            core_axes.extend(view.side_axes(side))
            shape.extend(view.shape[axis] for axis in view.side_axes(side))
    dtype = wide_dtype(*arrays)
    axes = ProductAxes(tuple(names), tuple(core_axes))
    return Product(tuple(arrays), jnp.zeros(shape, dtype), axes)


def moment_of(view: View, side: str, directions: Array) -> Product:
    """``xᵀ(x Ω)`` of what meets one side of a weight, as an empty array to differentiate."""
    names = (*view.batch_axes, *view.side_axes(side), _RANK_AXES[side])
    axes = ProductAxes((names,), names, view.side_axes(side))
    zeros = jnp.zeros(directions.shape, wide_dtype(directions))
    return Product((directions,), zeros, axes)


def factored_weight(weight: Array, path: str, products: Sequence[Product]) -> Factored:
    axes = tuple((axis,) for axis in range(weight.ndim))
    return Factored(weight, tuple(products), axes, tuple(weight.shape), path)


def main_product(target: CompactTarget, bases: Bases, extra: Array | None) -> Product:
    """The product that is the core; extra directions are further columns of its basis."""
    if extra is not None:
        (side,) = target.projection.sides
        widened = jnp.concatenate([bases.only(), extra.astype(jnp.float32)], axis=-1)
        bases = Bases.of(side, widened)
    return product_of(target.projection.view, bases)


def split_extra(target: CompactTarget, core: Array, extra: Array | None) -> Compact:
    """The core and the products with extra directions, from one product with both."""
    if extra is None:
        return Compact(shard_like(core, target.moment))
    (side,) = target.projection.sides
    axis = target.projection.view.core_axes([side])[side]
    core, more = jnp.split(core, [target.projection.rank], axis=axis)
    return Compact(shard_like(core, target.moment), more)
