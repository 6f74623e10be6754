"""The targets of a compact backward pass, with what their optimizer's state says of them."""

from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.tree import PyTree, find_states
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.extra_directions import ExtraDirections
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._plan.plan import Projection, Tracking
from lowrank_optax._plan.view import Bases
from lowrank_optax._subspace.state import SubspaceState


class CompactTarget(NamedTuple):
    """One target with what its tracker's state says of it.

    Attributes:
        projection: the target.
        bases: its bases as stored.
        tracking: the static facts of its tracker.
        key: the PRNG key of this step.
        due: boolean scalar, whether a refresh is due.
        first: boolean scalar, whether none has been yet.
        count: int32 scalar, updates so far.
        extra: the extra directions that the lift wants at each step, or None.
        moment: what the inner optimizer keeps of the core's shape, which the core is placed like
            on a mesh; None if it keeps nothing of that shape.
    """

    projection: Projection
    bases: Bases
    tracking: Tracking
    key: Array
    due: Array
    first: Array
    count: Array | int = 0
    extra: ExtraDirections | None = None
    moment: Any = None

    @property
    def path(self) -> str:
        """The leaf's name."""
        return self.projection.path

    def wide(self, stored: Bases) -> Bases:
        """Bases to compute with, from what is stored of this target's."""
        read = storage.read_all(stored, self.projection.view)
        return jax.tree.map(lambda b: b.astype(wide_dtype(b)), read)


def find_targets(opt_state: PyTree) -> list[CompactTarget]:
    """The targets of every subspace optimizer in a state."""
    _check_not_accumulated(opt_state)
    targets = []
    states = find_states(opt_state, SubspaceState)
    for state in states:
        extra = next(iter(find_states(state.lift_state, ExtraDirections)), None)
        kept = state.on_cores()
        for tracker in find_states(state.tracker_state, TrackerState):
            plan, count = tracker.plan, tracker.tracker_count
            if plan.projections:
                _check_needs_no_gradient(plan.tracking)
            due = count >= tracker.next_refresh
            for projection, bases in zip(plan.projections, tracker.stored(), strict=True):
                number = projection.number
                key = find.leaf_key(plan.tracking.seed, count, number)
                first = tracker.refreshes[number] == 0
                moment = next(iter(kept[projection.path]), None)
                facts = (projection, bases, plan.tracking, key, due[number], first)
                targets.append(CompactTarget(*facts, count, extra, moment))
    if not states:
        raise ValueError(
            "compact_value_and_grad: opt_state holds no subspace optimizer, so there is no basis "
            "to project on; pass the state of one, such as lro.galore_adamw(...).init(params), or "
            "use jax.value_and_grad"
        )
    return targets


def _check_not_accumulated(opt_state: PyTree) -> None:
    for node in find_states(opt_state, optax.MultiStepsState):
        if find_states(node, SubspaceState):
            raise ValueError(
                "compact_value_and_grad: optax.MultiSteps around the optimizer keeps full-sized "
                "sums of gradients, which compact ones cannot enter. Put it inside, "
                "lro.galore_project(optax.MultiSteps(...)), or sum the gradients of micro-batches "
                "before one update"
            )


def _check_needs_no_gradient(tracking: Tracking) -> None:
    if tracking.needs_gradient:
        raise ValueError(
            f"compact_value_and_grad: {tracking.needs_gradient} needs the full gradient, which "
            "here never exists; use jax.value_and_grad, or track with lro.refresh_basis and the "
            'method "subspace", "random" or "frozen"'
        )
