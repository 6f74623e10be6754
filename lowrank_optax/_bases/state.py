"""The states of trackers and of subspace optimizers, and how to find them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from lowrank_optax._arrays.tree import by_path
from lowrank_optax._bases.storage import read_all, shape_of
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases


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
    reduction_basis: Any
    output_basis: Any
    reduction_decoder: Any = None
    output_decoder: Any = None
    intervals: jax.Array | None = None

    def stored(self) -> list[Bases]:
        """The bases of each target as they are stored.

        Raises:
            ValueError: if a basis is of another shape than planned, as in a checkpoint that was
                written with another rank or other targets.
        """
        return _paired(self.plan, self.reduction_basis, self.output_basis)

    def encoders(self) -> list[Bases]:
        """What projects: the bases of each target."""
        return _read(self.plan, self.stored())

    def decoders(self) -> list[Bases]:
        """What lifts: the same, unless the tracker keeps matrices of their own for it."""
        if self.reduction_decoder is None:
            return self.encoders()
        return _read(self.plan, _paired(self.plan, self.reduction_decoder, self.output_decoder))


def arrays_on_core(leaf: LeafPlan, arrays: Mapping[str, Any]) -> list[Any]:
    """What an inner optimizer keeps of the shape of a leaf's core, given its arrays by path."""
    return [
        x
        for path, x in arrays.items()
        if f"/{path}".endswith(f"/{leaf.path}") and getattr(x, "shape", None) == leaf.core_shape
    ]


def _paired(plan: Plan, reduction: Any, output: Any) -> list[Bases]:
    """The bases of two sparse trees, one entry for each target."""
    left, right = by_path(reduction), by_path(output)
    paired = []
    for leaf in (plan.leaves[index] for index in plan.targets):
        found = Bases(left.get(leaf.path), right.get(leaf.path))
        _check_basis_shapes(leaf, found)
        paired.append(found)
    return paired


def _read(plan: Plan, stored: list[Bases]) -> list[Bases]:
    """Bases in a float dtype."""
    views = [plan.leaves[index].view for index in plan.targets]
    return [read_all(b, view) for b, view in zip(stored, views, strict=True) if view]


def _check_basis_shapes(leaf: LeafPlan, bases: Bases) -> None:
    assert leaf.view is not None
    for side in (REDUCTION, OUTPUT):
        expected = leaf.view.basis_shape(side, leaf.rank) if side in leaf.sides else None
        basis = getattr(bases, side)
        got = None if basis is None else shape_of(basis)
        if got != expected:
            raise ValueError(
                f"{leaf.path!r}: the state has {'no' if got is None else 'a'} basis of the {side} "
                f"side{'' if got is None else f' of shape {got}'}, and this optimizer, at rank "
                f"{leaf.rank}, {'none' if expected is None else f'one of shape {expected}'}. The "
                "state comes from another rank or other targets, by way of a checkpoint maybe; "
                "carry it over with lro.migrate(opt_state, old_tx, new_tx, params)"
            )
