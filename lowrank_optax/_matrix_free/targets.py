"""The targets of a compact backward pass, and the products of their gradients it makes."""

from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.tree import find_states
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.extra_directions import Sketch
from lowrank_optax._bases.state import TrackerState, arrays_on_core
from lowrank_optax._plan.plan import LeafPlan
from lowrank_optax._plan.view import Bases, View
from lowrank_optax._subspace.state import SubspaceState

# Methods whose refresh is a subspace iteration.
ITERATED = ("subspace", "frozen")


class CompactTarget(NamedTuple):
    """One target with what its tracker's state says of it.

    Attributes:
        plan: the leaf's plan.
        bases: its bases as stored.
        method: how they are found.
        key: the PRNG key of this step.
        due: boolean scalar, whether a refresh is due.
        first: boolean scalar, whether none has been yet.
        count: int32 scalar, updates so far.
        number: the target's number in its plan.
        sketch: the extra directions that the lift wants at each step, or None.
        moment: what the inner optimizer keeps of the core's shape, which the core is placed like
            on a mesh; None if it keeps nothing of that shape.
    """

    plan: LeafPlan
    bases: Bases
    method: str
    key: Array
    due: Array
    first: Array
    count: Array | int = 0
    number: int = 0
    sketch: Sketch | None = None
    moment: Any = None


def find_targets(opt_state: Any) -> list[CompactTarget]:
    """The targets of every subspace optimizer in a state."""
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)):
        if isinstance(node, optax.MultiStepsState) and find_states(node, SubspaceState):
            raise ValueError(
                "compact_value_and_grad: optax.MultiSteps around the optimizer keeps full-sized "
                "sums of gradients, which compact ones cannot enter. Put it inside, "
                "lro.galore_project(optax.MultiSteps(...)), or sum the gradients of micro-batches "
                "before one update"
            )
    trackers = [
        (tracker, next(iter(find_states(state.lift_state, Sketch)), None), state.inner_state)
        for state in find_states(opt_state, SubspaceState)
        for tracker in find_states(state.tracker_state, TrackerState)
    ]
    if not trackers:
        raise ValueError(
            "compact_value_and_grad: opt_state holds no subspace optimizer, so there is no basis "
            "to project on; pass the state of one, such as lro.galore_adamw(...).init(params), or "
            "use jax.value_and_grad"
        )
    targets = []
    for tracker, sketch, inner_state in trackers:
        plan, count = tracker.plan, tracker.tracker_count
        if plan.targets and plan.method in ("svd", "gram"):
            raise ValueError(
                f"compact_value_and_grad: method={plan.method!r} needs the full gradient, which "
                'here never exists; use method="subspace", "random" or "frozen"'
            )
        if plan.targets and plan.method.startswith("learn"):
            raise ValueError(
                "compact_value_and_grad: learn_basis takes steps relative to the norm of the full "
                "gradient, which here never exists; use jax.value_and_grad, or track with "
                "lro.refresh_basis(...)"
            )
        stored, arrays = tracker.stored(), tree.by_path(inner_state)
        due = count >= tracker.next_refresh
        for number, (index, bases) in enumerate(zip(plan.targets, stored, strict=True)):
            key = find.leaf_key(plan.seed, count, number)
            first = tracker.refreshes[number] == 0
            leaf = plan.leaves[index]
            facts = (leaf, bases, plan.method, key, due[number], first)
            moment = next(iter(arrays_on_core(leaf, arrays)), None)
            targets.append(CompactTarget(*facts, count, number, sketch, moment))
    return targets


def view_of(target: CompactTarget) -> View:
    assert target.plan.view is not None
    return target.plan.view


def wide(stored: Bases, view: View) -> Bases:
    """Bases to compute with, from what is stored."""
    return jax.tree.map(lambda b: b.astype(wide_dtype(b)), storage.read_all(stored, view))
