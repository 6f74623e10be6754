"""Bases for the targets of another optimizer: kept, grown, cut, or found in the moments."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import gram, orthonormalize, times
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._bases.tracker import NEVER, with_bases
from lowrank_optax._inner.sites import Site, Space
from lowrank_optax._migrate import reencode
from lowrank_optax._plan.plan import LeafPlan
from lowrank_optax._plan.view import Bases, View


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

    def outside(x: Array) -> Array:
        return x - times(basis, gram(basis, x, batch_ndim), batch_ndim)

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
    noise = find.random_directions(key, view, side, start.shape[-1], wide.dtype)
    found = find.subspace_iteration(moment, view, side, wide, noise, find.COLD_ITERATIONS)
    usable = find.is_usable(moment) & jnp.all(jnp.isfinite(found))
    return jnp.where(usable, place_like(found.astype(start.dtype), start), start), usable


def _first_moment(path: str, shape: tuple[int, ...], old: Sequence[Site]) -> Any:
    """A weight's first moment in its own shape, if the old state has one."""
    found = [s for s in old if s.path == path and s.role == "first"]
    # A sum of gradients that has just begun says less than an average over many steps.
    found.sort(key=lambda site: site.field == "acc_grads")
    for site in found:
        if site.value.shape == reencode.shape_in(site.space, shape):
            leaf = site.space.leaf
            if leaf is None or leaf.view is None:
                return site.value
            return leaf.view.lift(site.value, site.space.duals())
    return None


class _Kept(NamedTuple):
    """A weight that was a target on the same side before."""

    tracker: TrackerState
    number: int
    space: Space
    decoders: Bases


def _kept(leaf: LeafPlan, trackers: Sequence[TrackerState]) -> _Kept | None:
    for tracker in trackers:
        plan = tracker.plan
        pairs = zip(tracker.encoders(), tracker.decoders(), strict=True)
        for number, (index, (basis, decoders)) in enumerate(zip(plan.targets, pairs, strict=True)):
            old = plan.leaves[index]
            if (old.path, old.view, old.sides) == (leaf.path, leaf.view, leaf.sides):
                return _Kept(tracker, number, Space(old, basis, plan.orthonormal), decoders)
    return None


def _kept_bases(kept: _Kept, new: Space) -> Bases:
    """The bases of a weight that keeps its side, in the new rank."""
    bases = {}
    for side in ("reduction", "output"):
        start, basis = getattr(new.bases, side), getattr(kept.space.bases, side)
        if start is None or new.leaf is None or new.leaf.view is None:
            continue
        batch_ndim, wide = len(new.leaf.view.batch_axes), wide_dtype(basis)
        if not kept.space.is_nested(new):  # an autoencoder's columns, not orthonormal yet
            basis = orthonormalize(basis.astype(wide), basis.astype(wide), batch_ndim)
        if basis.shape != start.shape:
            basis = _resize(basis.astype(wide), start.astype(wide), batch_ndim)
        bases[side] = place_like(basis.astype(start.dtype), start)
    return Bases(**bases)


def _found_bases(new: Space, moment: Any, seed: int, number: int) -> tuple[Bases, Any]:
    """The bases of a new target, and whether its first moment had any to give."""
    bases, usable = new.bases, jnp.zeros([], jnp.bool_)
    if moment is None or new.leaf is None or new.leaf.view is None:
        return bases, usable
    for turn, side in enumerate(new.leaf.sides):
        key = find.leaf_key(seed, np.uint32(NEVER - 1 - turn), number)
        start = getattr(bases, side)
        found, usable = _leading(moment, new.leaf.view, side, start, key)
        bases = bases._replace(**{side: found})
    return bases, usable


def _due(kept: _Kept, frozen: bool) -> Any:
    """The step of a kept basis's next refresh: as it was, unless it was or becomes frozen."""
    due = kept.tracker.next_refresh[kept.number]
    due = jnp.where((due == NEVER) != frozen, NEVER if frozen else 0, due)
    # A basis that is still the random start is to be found yet.
    return jnp.where(kept.tracker.refreshes[kept.number] == 0, 0, due)


def _carry_tracker(
    fresh: TrackerState,
    trackers: Sequence[TrackerState],
    old: Sequence[Site],
    steps: Any,
    arrays: Mapping[str, Any],
) -> TrackerState:
    plan = fresh.plan
    next_refresh, refreshes = list(fresh.next_refresh), list(fresh.refreshes)
    intervals = None if fresh.intervals is None else list(fresh.intervals)
    encoders, decoders = [], []
    for number, (index, start) in enumerate(zip(plan.targets, fresh.encoders(), strict=True)):
        leaf = plan.leaves[index]
        new, kept = Space(leaf, start, plan.orthonormal), _kept(leaf, trackers)
        lifts = None
        if kept is None:
            moment = _first_moment(leaf.path, tuple(arrays[leaf.path].shape), old)
            bases, usable = _found_bases(new, moment, plan.seed, number)
            refreshes[number] = usable.astype(jnp.int32)
        else:
            bases = _kept_bases(kept, new)
            refreshes[number] = kept.tracker.refreshes[kept.number]
            next_refresh[number] = _due(kept, plan.method == "frozen")
            if intervals is not None and kept.tracker.intervals is not None:
                intervals[number] = kept.tracker.intervals[kept.number]
            same = kept.space.leaf is not None and kept.space.leaf.rank == leaf.rank
            if same and kept.space.is_nested(new):
                lifts = kept.decoders
        encoders.append(bases)
        # Arrays of their own, since a donated buffer may be given only once.
        decoders.append(jax.tree.map(jnp.copy, bases if lifts is None else lifts))
    stored = [
        storage.store_all(bases, view, like)
        for bases, view, like in zip(
            encoders, [plan.leaves[i].view for i in plan.targets], fresh.stored(), strict=True
        )
        if view is not None
    ]
    counts = [t.tracker_count for t in trackers] or ([] if steps is None else [steps])
    reduction, output = with_bases(plan, fresh.reduction_basis, fresh.output_basis, stored)
    state = fresh._replace(
        tracker_count=counts[0] if counts else fresh.tracker_count,
        next_refresh=jnp.stack(next_refresh),
        refreshes=jnp.stack(refreshes),
        reduction_basis=reduction,
        output_basis=output,
        intervals=None if intervals is None else jnp.stack(intervals),
    )
    if fresh.reduction_decoder is None:
        return state
    pair = with_bases(plan, fresh.reduction_decoder, fresh.output_decoder, decoders)
    return state._replace(reduction_decoder=pair[0], output_decoder=pair[1])


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
