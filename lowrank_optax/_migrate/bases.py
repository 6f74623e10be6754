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
from lowrank_optax._arrays.tree import OptState
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.schedule import NEVER
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner.roles import FIRST
from lowrank_optax._migrate.space import Place, lifted, shape_in
from lowrank_optax._plan.plan import Projection
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


def _first_moment(path: str, shape: tuple[int, ...], old: Sequence[Place]) -> Array | None:
    """A weight's first moment in its own shape, if the old state has one."""
    found = [place for place in old if place.path == path and place.site.role == FIRST]
    # A sum of gradients that has just begun says less than an average over many steps.
    found.sort(key=lambda place: place.site.field == "acc_grads")
    for place in found:
        if place.value.shape == shape_in(place.space, shape):
            return lifted(place.space, place.value)
    return None


class _Kept(NamedTuple):
    """A weight that was a target on the same side before."""

    tracker: TrackerState
    projection: Projection
    bases: Bases
    decoders: Bases


def _kept(projection: Projection, trackers: Sequence[TrackerState]) -> _Kept | None:
    for tracker in trackers:
        rows = zip(tracker.plan.projections, tracker.encoders(), tracker.decoders(), strict=True)
        for old, bases, decoders in rows:
            if (old.path, old.view, old.sides) == (
                projection.path,
                projection.view,
                projection.sides,
            ):
                return _Kept(tracker, old, bases, decoders)
    return None


def _kept_bases(kept: _Kept, projection: Projection, start: Bases) -> Bases:
    """The bases of a weight that keeps its side, in the new rank."""

    def one(basis: Array, start: Array) -> Array:
        wide = wide_dtype(basis)
        if basis.shape != start.shape:
            batch_ndim = len(projection.view.batch_axes)
            basis = _resize(basis.astype(wide), start.astype(wide), batch_ndim)
        return place_like(basis.astype(start.dtype), start)

    return jax.tree.map(one, kept.bases, start)


def _found_bases(
    projection: Projection, start: Bases, moment: Array | None, seed: int
) -> tuple[Bases, Array]:
    """The bases of a new target, and whether its first moment had any to give."""
    bases, usable = start, jnp.zeros([], jnp.bool_)
    if moment is None:
        return bases, usable
    for turn, side in enumerate(projection.sides):
        key = find.leaf_key(seed, np.uint32(NEVER - 1 - turn), projection.number)
        found, usable = _leading(moment, projection.view, side, getattr(start, side), key)
        bases = bases._replace(**{side: found})
    return bases, usable


def _due(kept: _Kept, frozen: bool) -> Array:
    """The step of a kept basis's next refresh: as it was, unless it was or becomes frozen."""
    number = kept.projection.number
    due = kept.tracker.next_refresh[number]
    due = jnp.where((due == NEVER) != frozen, NEVER if frozen else 0, due)
    # A basis that is still the random start is to be found yet.
    return jnp.where(kept.tracker.refreshes[number] == 0, 0, due)


def _carry_tracker(
    fresh: TrackerState,
    trackers: Sequence[TrackerState],
    old: Sequence[Place],
    steps: Array | None,
    arrays: Mapping[str, Array],
) -> TrackerState:
    tracking = fresh.plan.tracking
    next_refresh, refreshes = list(fresh.next_refresh), list(fresh.refreshes)
    intervals = None if fresh.intervals is None else list(fresh.intervals)
    encoders, decoders = [], []
    rows = zip(fresh.plan.projections, fresh.encoders(), fresh.stored(), strict=True)
    for projection, start, stored in rows:
        kept, number = _kept(projection, trackers), projection.number
        if kept is None:
            moment = _first_moment(projection.path, tuple(arrays[projection.path].shape), old)
            bases, usable = _found_bases(projection, start, moment, tracking.seed)
            refreshes[number] = usable.astype(jnp.int32)
        else:
            bases, before = _kept_bases(kept, projection, start), kept.projection.number
            refreshes[number] = kept.tracker.refreshes[before]
            next_refresh[number] = _due(kept, tracking.frozen)
            if intervals is not None and kept.tracker.intervals is not None:
                intervals[number] = kept.tracker.intervals[before]
        same_rank = kept is not None and kept.projection.rank == projection.rank
        encoders.append(storage.store_all(bases, projection.view, stored))
        # Arrays of their own, since a donated buffer may be given only once.
        decoders.append(jax.tree.map(jnp.copy, kept.decoders if kept and same_rank else bases))
    counts = [t.tracker_count for t in trackers] or ([] if steps is None else [steps])
    return fresh.with_bases(encoders, decoders)._replace(
        tracker_count=counts[0] if counts else fresh.tracker_count,
        next_refresh=jnp.stack(next_refresh),
        refreshes=jnp.stack(refreshes),
        intervals=None if intervals is None else jnp.stack(intervals),
    )


def carry_bases(
    fresh: OptState,
    trackers: Sequence[TrackerState],
    old: Sequence[Place],
    steps: Array | None,
    arrays: Mapping[str, Array],
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

    def carried(node: OptState) -> OptState:
        if not isinstance(node, TrackerState):
            return node
        return _carry_tracker(node, trackers, old, steps, arrays)

    return jax.tree.map(carried, fresh, is_leaf=lambda node: isinstance(node, TrackerState))
