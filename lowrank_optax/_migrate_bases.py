"""Bases for the targets of another optimizer: kept, grown, cut, or found in the moments."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax import _reencode, _subspace_methods, _tree
from lowrank_optax._contract import REFRESH_PRECISION, contract, place_like, wide_dtype
from lowrank_optax._orthonormalize import gram, orthonormalize
from lowrank_optax._plan import LeafPlan
from lowrank_optax._sites import Site
from lowrank_optax._state import TrackerState
from lowrank_optax._view import View

_NEVER = np.iinfo(np.int32).max


def resize(
    basis: Float[Array, "*rows r"], start: Float[Array, "*rows k"], batch_ndim: int = 0
) -> Float[Array, "*rows k"]:
    """A basis with as many columns as ``start``: its leading ones, or it and further ones.

    Args:
        basis: orthonormal columns ``(*batch, *side, r)``.
        start: orthonormal columns ``(*batch, *side, k)``; what of them is outside of ``basis``
            continues it.
        batch_ndim: number of leading axes that index independent matrices.

    Returns:
        An orthonormal basis whose first ``min(r, k)`` columns are those of ``basis``.
    """
    rank, columns = basis.shape[-1], start.shape[-1]
    if columns <= rank:
        return basis[..., :columns]
    side = "abcdefghijklmn"[: basis.ndim - 1]
    batch = side[:batch_ndim]

    def outside(x: Array) -> Array:
        inside = gram(basis, x, batch_ndim)
        return x - contract(
            f"{side}y,{batch}yz->{side}z", basis, inside, precision=REFRESH_PRECISION
        )

    more, fill = outside(start[..., rank:]), outside(start[..., : columns - rank])
    # Twice, since what is left of a nearly contained direction is mostly rounding error.
    for _ in range(2):
        more = outside(orthonormalize(more, fill, batch_ndim))
    return jnp.concatenate([basis, orthonormalize(more, fill, batch_ndim)], -1)


_resize = jax.jit(resize, static_argnums=2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _leading(
    moment: Float[Array, "..."],
    view: View,
    side: str,
    start: Float[Array, "*rows r"],
    key: Array,
) -> tuple[Array, Array]:
    """The leading subspace of a first moment, or ``start`` where it has none; and whether."""
    wide = start.astype(wide_dtype(start))
    noise = _subspace_methods.random_directions(key, view, side, start.shape[-1], wide.dtype)
    found = _subspace_methods.subspace_iteration(
        moment, view, side, wide, noise, _subspace_methods.COLD_ITERATIONS
    )
    usable = _subspace_methods.is_usable(moment) & jnp.all(jnp.isfinite(found))
    return jnp.where(usable, place_like(found.astype(start.dtype), start), start), usable


def _first_moment(path: str, shape: tuple[int, ...], old: Sequence[Site]) -> Any:
    """A weight's first moment in its own shape, if the old state has one."""
    found = [s for s in old if s.path == path and s.role == "first"]
    # A sum of gradients that has just begun says less than an average over many steps.
    found.sort(key=lambda site: site.field == "acc_grads")
    for site in found:
        if site.value.shape == _reencode.shape_in(site.space, shape):
            leaf = site.space.leaf
            if leaf is None or leaf.view is None:
                return site.value
            return leaf.view.lift(site.value, site.space.bases)
    return None


def _old_basis(leaf: LeafPlan, trackers: Sequence[TrackerState]) -> Any:
    """The tracker, number and bases of a weight that was a target on the same side before."""
    for tracker in trackers:
        bases = tracker.plan.bases(tracker.reduction_basis, tracker.output_basis)
        for number, (index, basis) in enumerate(zip(tracker.plan.targets, bases, strict=True)):
            before = tracker.plan.leaves[index]
            if before.path == leaf.path and _reencode.is_nested(before, leaf):
                return tracker, number, basis
    return None


def _carry_tracker(
    fresh: TrackerState,
    trackers: Sequence[TrackerState],
    old: Sequence[Site],
    steps: Any,
    arrays: Mapping[str, Any],
) -> TrackerState:
    plan = fresh.plan
    starts = plan.bases(fresh.reduction_basis, fresh.output_basis)
    next_refresh, refreshes = list(fresh.next_refresh), list(fresh.refreshes)
    new: dict[str, dict[str, Any]] = {"reduction": {}, "output": {}}
    for number, (index, start) in enumerate(zip(plan.targets, starts, strict=True)):
        leaf = plan.leaves[index]
        view = leaf.view
        assert view is not None
        found = _old_basis(leaf, trackers)
        moment = None
        if found is None:
            moment = _first_moment(leaf.path, tuple(arrays[leaf.path].shape), old)
        else:
            tracker, old_number, old_bases = found
            due = tracker.next_refresh[old_number]
            frozen = plan.method == "frozen"
            # A frozen basis is never due; whether this one is to be frozen, the new plan says.
            due = jnp.where((due == _NEVER) != frozen, _NEVER if frozen else 0, due)
            refreshes[number] = tracker.refreshes[old_number]
            next_refresh[number] = jnp.where(refreshes[number] == 0, 0, due)
        for turn, side in enumerate(leaf.sides):
            begin = getattr(start, side)
            if found is not None:
                basis = getattr(old_bases, side)
                if basis.shape != begin.shape:
                    wide = basis.astype(wide_dtype(basis))
                    basis = _resize(wide, begin.astype(wide.dtype), len(view.batch_axes))
                new[side][leaf.path] = place_like(basis.astype(begin.dtype), begin)
            elif moment is not None:
                key = _subspace_methods.leaf_key(plan.seed, np.uint32(_NEVER - 1 - turn), number)
                basis, usable = _leading(moment, view, side, begin, key)
                new[side][leaf.path] = basis
                refreshes[number] = usable.astype(jnp.int32)
    counts = [t.tracker_count for t in trackers] or ([] if steps is None else [steps])
    return fresh._replace(
        tracker_count=counts[0] if counts else fresh.tracker_count,
        next_refresh=jnp.stack(next_refresh),
        refreshes=jnp.stack(refreshes),
        reduction_basis=_tree.with_leaves(fresh.reduction_basis, new["reduction"]),
        output_basis=_tree.with_leaves(fresh.output_basis, new["output"]),
    )


def carry_bases(
    fresh: Any,
    trackers: Sequence[TrackerState],
    old: Sequence[Site],
    steps: Any,
    arrays: Mapping[str, Any],
) -> Any:
    """A fresh state whose trackers have the bases of an old one.

    Args:
        fresh: what the new optimizer's init returned.
        trackers: the trackers of the old state.
        old: all arrays of the old state.
        steps: how many updates it has seen, None if nothing counted them.
        arrays: the params by path.

    Returns:
        ``fresh`` with other bases, counters and times of the next refresh.
    """

    def carried(node: Any) -> Any:
        if not isinstance(node, TrackerState):
            return node
        return _carry_tracker(node, trackers, old, steps, arrays)

    return jax.tree.map(carried, fresh, is_leaf=lambda node: isinstance(node, TrackerState))
