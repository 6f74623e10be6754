"""The states of trackers and of subspace optimizers, and how to find them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.view import Bases


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
        """The bases of each target as they are stored."""
        return self.plan.stored_bases(self.reduction_basis, self.output_basis)

    def encoders(self) -> list[Bases]:
        """What projects: the bases of each target."""
        return self.plan.bases(self.reduction_basis, self.output_basis)

    def decoders(self) -> list[Bases]:
        """What lifts: the same, unless the tracker keeps matrices of their own for it."""
        if self.reduction_decoder is None:
            return self.encoders()
        return self.plan.bases(self.reduction_decoder, self.output_decoder)


class SubspaceState(NamedTuple):
    """State of a subspace optimizer.

    Attributes:
        tracker_state: the tracker's state, with the plan and the bases.
        inner_state: the inner optimizer's state, on cores; None for a filter.
        lift_state: the lift's state.
        fidelity: vectors of metrics, one entry a target; None without ``metrics``.
    """

    tracker_state: Any
    inner_state: Any
    lift_state: Any
    fidelity: Any


def find_states(state: Any, kind: type) -> list[Any]:
    """Every node of a type in an optimizer state, through any wrapper."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def arrays_on_core(leaf: LeafPlan, arrays: Mapping[str, Any]) -> list[Any]:
    """What an inner optimizer keeps of the shape of a leaf's core, given its arrays by path."""
    return [
        x
        for path, x in arrays.items()
        if f"/{path}".endswith(f"/{leaf.path}") and getattr(x, "shape", None) == leaf.core_shape
    ]
