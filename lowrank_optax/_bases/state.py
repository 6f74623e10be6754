"""The state of a tracker: a plan, bases, and when each target is due."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import rebox_part, unbox
from lowrank_optax._arrays.mesh import explicit_spec
from lowrank_optax._arrays.tree import Params, PyTree
from lowrank_optax._bases.storage import read_all, shape_of
from lowrank_optax._plan.plan import Plan, Projection
from lowrank_optax._plan.view import BOTH, OUTPUT, REDUCTION, Bases


class TrackerState(NamedTuple):
    """State of a tracker.

    Attributes:
        plan: the static plan; no arrays.
        tracker_count: int32 scalar, updates so far.
        next_refresh: int32 of the number of targets, the step at which each is due. One
            entry at least, also where there is no target.
        refreshes: int32 likewise, how often each basis was replaced.
        reduction_basis: a tree parallel to params: ``(*batch, *reduction, r)`` at targets
            with a basis on that side, ``optax.MaskedNode()`` elsewhere. With ``dtype=jnp.int4``
            the last axis is half as long.
        output_basis: likewise for the output side.
        reduction_decoder: likewise, the matrices that lift where they are not the bases that
            project; None where these do both.
        output_decoder: likewise for the output side.
        intervals: int32 of the number of targets, the current interval of each where
            :func:`adaptive_every` decides it, else None.
    """

    plan: Plan
    tracker_count: jax.Array
    next_refresh: jax.Array
    refreshes: jax.Array
    reduction_basis: PyTree
    output_basis: PyTree
    reduction_decoder: PyTree = None
    output_decoder: PyTree = None
    intervals: jax.Array | None = None

    def stored(self) -> list[Bases]:
        """The bases of each target as they are stored.

        Raises:
            ValueError: if a basis is of another shape than planned, as in a checkpoint that was
                written with another rank or other targets.
        """
        return _paired(self.plan, self.reduction_basis, self.output_basis)

    def stored_decoders(self) -> list[Bases]:
        """The matrices of their own that lift, empty for each target if there are none."""
        if self.reduction_decoder is None:
            return [Bases()] * len(self.plan.projections)
        return _paired(self.plan, self.reduction_decoder, self.output_decoder)

    def encoders(self) -> list[Bases]:
        """What projects: the bases of each target."""
        return _read(self.plan, self.stored())

    def decoders(self) -> list[Bases]:
        """What lifts: the same, unless the tracker keeps matrices of their own for it."""
        if self.reduction_decoder is None:
            return self.encoders()
        return _read(self.plan, self.stored_decoders())

    def with_bases(self, stored: Sequence[Bases], decoders: Sequence[Bases] = ()) -> "TrackerState":
        """This state with the bases of each target replaced, and the decoders if there are any."""
        reduction, output = (
            _replaced(self.plan, getattr(self, f"{side}_basis"), side, stored) for side in BOTH
        )
        state = self._replace(reduction_basis=reduction, output_basis=output)
        if self.reduction_decoder is None:
            return state
        reduction, output = (
            _replaced(self.plan, getattr(self, f"{side}_decoder"), side, decoders) for side in BOTH
        )
        return state._replace(reduction_decoder=reduction, output_decoder=output)


def start_state(plan: Plan, params: Params, bases: Sequence[Bases]) -> TrackerState:
    """The state of a tracker before its first update; every target is due."""
    reduction, output = (_basis_tree(plan, params, side, bases) for side in BOTH)
    counters = max(1, len(plan.projections))
    return TrackerState(
        plan=plan,
        tracker_count=jnp.zeros([], jnp.int32),
        next_refresh=jnp.zeros(counters, jnp.int32),
        refreshes=jnp.zeros(counters, jnp.int32),
        reduction_basis=reduction,
        output_basis=output,
    )


def _basis_tree(plan: Plan, params: Params, side: str, bases: Sequence[Bases]) -> PyTree:
    """A tree parallel to params with the bases of one side at targets."""
    boxes, treedef = tree.flatten(params)
    leaves: list[Any] = [None] * len(boxes)
    for projection, found in zip(plan.projections, bases, strict=True):
        basis = found.on(side)
        if basis is not None:
            view, like = projection.view, boxes[projection.index]
            placed = view.place_basis(basis, side, unbox(like), spreading=True)
            leaves[projection.index] = rebox_part(
                like, placed, view.basis_axes(side), explicit_spec(placed)
            )
    return tree.sparse_tree(treedef, leaves)


def _replaced(plan: Plan, old: PyTree, side: str, bases: Sequence[Bases]) -> PyTree:
    pairs = zip(plan.projections, bases, strict=True)
    return tree.with_leaves(old, {projection.path: found.on(side) for projection, found in pairs})


def _paired(plan: Plan, reduction: PyTree, output: PyTree) -> list[Bases]:
    """The bases of two sparse trees, one entry for each target."""
    left, right = tree.by_path(reduction), tree.by_path(output)
    paired = []
    for projection in plan.projections:
        found = Bases(left.get(projection.path), right.get(projection.path))
        _check_shapes(projection, found)
        paired.append(found)
    return paired


def _read(plan: Plan, stored: Sequence[Bases]) -> list[Bases]:
    """Bases in a float dtype."""
    return [read_all(b, p.view) for p, b in zip(plan.projections, stored, strict=True)]


def _check_shapes(projection: Projection, bases: Bases) -> None:
    for side in (REDUCTION, OUTPUT):
        expected = None
        if side in projection.sides:
            expected = projection.view.basis_shape(side, projection.rank)
        basis = bases.on(side)
        got = None if basis is None else shape_of(basis)
        if got != expected:
            raise ValueError(
                f"{projection.path!r}: the state has {'no' if got is None else 'a'} basis of the "
                f"{side} side{'' if got is None else f' of shape {got}'}, and this optimizer, at "
                f"rank {projection.rank}, "
                f"{'none' if expected is None else f'one of shape {expected}'}. The "
                "state comes from another rank or other targets, by way of a checkpoint maybe; "
                "carry it over with lro.migrate(opt_state, old_tx, new_tx, params)"
            )
