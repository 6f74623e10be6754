r"""Moments of one weight, from one space to another: whole, in a basis, in another basis.

A first moment is linear in the gradient, so it is projected and lifted as a gradient is. A
second moment is the diagonal of the gradient's covariance (about zero), of which the rest is
not known. It is modelled as that of independent coordinates around a mean,
:math:`\mathrm{diag}(\sigma^2) + c\,m m^T`, with :math:`\sigma^2 = v - c\,m^2`; and of
directions that no basis has seen, all that is assumed is :math:`\tau`, the smallest second
moment seen in the same column.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import Bases


def _resized(x: Array, axis: int, size: int, filler: Array) -> Array:
    """``x`` with its first ``size`` entries along an axis, continued by ``filler``."""
    old = x.shape[axis]
    if size <= old:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    # Not by concatenation, which wants both parts to be sharded alike.
    widths = [(0, size - old if number == axis else 0) for number in range(x.ndim)]
    new = (np.arange(size) >= old).reshape([-1 if n == axis else 1 for n in range(x.ndim)])
    return jnp.pad(x, widths) + jnp.asarray(new, x.dtype) * filler


def _rank_axes(projection: Projection) -> tuple[int, ...]:
    return tuple(projection.view.core_axes(projection.sides).values())


def _squared(bases: Bases) -> Bases:
    return Bases(*(None if b is None else jnp.square(b) for b in bases))


def _project(x: Array, projection: Projection | None, bases: Bases) -> Array:
    return x if projection is None else projection.view.project(x, bases)


def _lift(x: Array, projection: Projection | None, bases: Bases) -> Array:
    return x if projection is None else projection.view.lift(x, bases)


class _Move(NamedTuple):
    """From where to where, as :func:`reencode` has it."""

    old: Projection | None
    new: Projection | None
    nested: bool


def _first(x: Float[Array, "..."], move: _Move, before: Bases, after: Bases) -> Float[Array, "..."]:
    if not move.nested:
        return _project(_lift(x, move.old, before), move.new, after)
    if move.new is not None:
        for axis in _rank_axes(move.new):
            x = _resized(x, axis, move.new.rank, jnp.zeros([], x.dtype))
    return x


def _unseen(second: Float[Array, "..."], old: Projection) -> Float[Array, "..."]:
    """The second moment assumed in directions outside of a basis: the smallest one inside."""
    return jnp.min(second, axis=_rank_axes(old), keepdims=True)


def _second(
    x: Float[Array, "..."],
    mean: Float[Array, "..."] | None,
    bias: Float[Array, ""],
    move: _Move,
    before: Bases,
    after: Bases,
) -> Float[Array, "..."]:
    old, new, nested = move
    if nested:
        # The first coordinates are the same directions. Of further ones nothing was seen.
        if old is not None and new is not None:
            filler = _unseen(x, old)
            for axis in _rank_axes(new):
                x = _resized(x, axis, new.rank, filler)
        return x
    # The model: coordinates k of the old core are independent, with variances σ²ₖ = vₖ − c mₖ²
    # around means mₖ. Entry i of the gradient is Σₖ Pᵢₖ Cₖ plus what P does not hold, so that its
    # variance is Σₖ Pᵢₖ² σ²ₖ plus the share of i outside of P, 1 − Σₖ Pᵢₖ², times τ.
    squared_mean = 0.0 if mean is None else bias * jnp.square(mean)
    variance = jnp.maximum(x - squared_mean, 0.0)
    whole = _lift(variance, old, _squared(before))
    if old is not None:
        inside = _lift(jnp.ones_like(x), old, _squared(before))
        # τ has one value for each column, a length-1 axis for the rank. Lifted by ones, which sum
        # over the rank axis, each of its r equal parts must be τ / r; with two sides τ / r².
        unseen = jnp.broadcast_to(_unseen(x, old), x.shape) / old.rank ** len(old.sides)
        ones = Bases(*(None if b is None else jnp.ones_like(b) for b in before))
        whole += jnp.maximum(1.0 - inside, 0.0) * _lift(unseen, old, ones)
    # Into the new coordinates in the same way: variances by squares, means by P'ᵀ, and the second
    # moment is variance plus squared mean.
    moved = _project(whole, new, _squared(after))
    if mean is None:
        return moved
    return moved + bias * jnp.square(_first(mean, move, before, after))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def reencode(
    old: Projection | None,
    new: Projection | None,
    nested: bool,
    roles: tuple[tuple[str, str], ...],
    before: Bases,
    after: Bases,
    moments: Mapping[str, Float[Array, "..."]],
    bias: Float[Array, ""],
) -> dict[str, Any]:
    r"""The moments of one weight in another space.

    From basis :math:`P` to :math:`P'`, either of which may be the identity, with
    :math:`Q = P'^T P`,

    .. math:: m' = Q m, \qquad
              v' = (Q \circ Q)\,\sigma^2 + \tau\,(1 - (Q \circ Q) 1) + c\,(Q m)^2

    Where one subspace contains the other by construction (another rank, the same side), what
    they share is copied, and new coordinates get :math:`m' = 0, v' = \tau`.

    Args:
        old: the target that the moments are in the core space of; None for the weight's own
            space.
        new: likewise, where they go.
        nested: whether the two share their first coordinates.
        roles: pairs of a name in ``moments`` and its role.
        before: the bases of ``old``.
        after: the bases of ``new``.
        moments: arrays by name, of the shapes of ``old``.
        bias: :math:`c`, by which the square of the first moment is on the scale of the second.

    Returns:
        The moments by name, in the shapes of ``new``, in float32 or wider.
    """
    wide = {name: x.astype(wide_dtype(x)) for name, x in moments.items()}
    mean = next((wide[name] for name, role in roles if role == "first"), None)
    move, moved = _Move(old, new, nested), {}
    for name, role in roles:
        if role == "first":
            moved[name] = _first(wide[name], move, before, after)
        else:
            paired = mean if role == "second" else None
            moved[name] = _second(wide[name], paired, bias, move, before, after)
    return moved
