"""Any optimizer, run inside a subspace of each weight's gradient.

:func:`subspace_optimizer` is the order of things: track, encode, carry, inner, lift. Each verb is
a function of `step.py` or of `_inner`. What users call are ``galore_project`` and ``logra_sketch``,
which differ in their defaults and in what may stand between encoding and update.
"""

import warnings
from typing import Any

import jax
import optax

from lowrank_optax._arrays.tree import OptState, Params, Updates, find_states, flatten
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import check_choice
from lowrank_optax._inner import carry
from lowrank_optax._subspace import step
from lowrank_optax._subspace.cores import with_cores, zero_cores
from lowrank_optax._subspace.lift import Lift, subspace_lift
from lowrank_optax._subspace.metrics import empty_fidelity, stack_fidelities
from lowrank_optax._subspace.nonlinearity import Nonlinearity
from lowrank_optax._subspace.state import SubspaceState


def subspace_optimizer(
    name: str,
    inner: Any,
    basis: Any,
    *,
    scale: Any,
    lift: Any,
    moments: carry.Moments,
    metrics: bool,
    nonlinearity: Nonlinearity | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose inner one sees the gradients of targets as cores only.

    Args:
        name: the public function's, for messages.
        inner: as for :func:`galore_project`.
        basis: the tracker.
        scale: as for :func:`galore_project`.
        lift: likewise.
        moments: likewise.
        metrics: likewise.
        nonlinearity: applied to the cores of gradients before anything sees them.

    Returns:
        The gradient transformation.
    """
    _check_transformation(name, "inner", inner, "optax.adamw(1e-3)")
    _check_transformation(name, "basis", basis, "lro.refresh_basis(rank=128)")
    if not callable(moments):
        check_choice(f"{name}: moments", moments, carry.RULES)
    chosen_lift = subspace_lift() if lift is None else lift
    if not isinstance(chosen_lift, Lift):
        raise TypeError(f"{name}: lift must be a lift such as lro.subspace_lift(), got {lift!r}")
    track = optax.with_extra_args_support(basis)
    optimizer = None if inner is None else optax.with_extra_args_support(inner)

    def init_fn(params: Params) -> OptState:
        tracker_state = track.init(params)
        tracker = _tracker_in(name, tracker_state)
        cores = zero_cores(tracker, params)
        chosen_lift.check_inner(optimizer, cores)
        inner_state = None if optimizer is None else optimizer.init(cores)
        if tracker.plan.projections and not chosen_lift.takes_signs:
            _warn_of_signs(name, inner_state)
        return SubspaceState(
            tracker_state=tracker_state,
            inner_state=inner_state,
            lift_state=chosen_lift.init(tracker.plan),
            fidelity=empty_fidelity(tracker.plan) if metrics else None,
        )

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, OptState]:
        before = _tracker_in(name, state.tracker_state)
        given = extra_args.get("bases")
        inner_args = {key: value for key, value in extra_args.items() if key != "bases"}
        like = flatten(updates if params is None else params)[0]

        # Track: the bases of this step.
        _, tracker_state = track.update(updates, state.tracker_state, params, **extra_args)
        tracker = _tracker_in(name, tracker_state)
        targets = step.tracked(tracker, updates, like)
        projections = tracker.plan.projections

        # Encode: what the inner optimizer sees in the place of gradients.
        targets = step.encoded(targets, nonlinearity)
        cores = with_cores(updates, projections, [t.core for t in targets], like)

        # Carry: what the inner optimizer remembers, from the old bases to the new.
        inner_state = state.inner_state
        if optimizer is not None and projections:
            change = carry.Change(
                projections,
                new=[t.bases for t in targets],
                old=lambda: step.bases_of(before, like),
                refreshed=tracker.refreshes != before.refreshes,
            )
            count = before.tracker_count
            inner_state = carry.carry(
                moments, optimizer, inner_state, cores, change, count, inner_args
            )
        if chosen_lift.needs_gain:
            targets = step.with_gains(targets, optimizer, cores, inner_state, inner_args)

        # Inner: its own update, of the size of cores.
        answers, decay, inner_state = step.answered(
            targets, optimizer, cores, inner_state, params, inner_args
        )
        targets = step.with_answers(targets, answers, decay)

        # Lift: full-sized updates.
        targets = step.sketched(targets, state.lift_state, before.tracker_count, given)
        lifted, lift_state = step.lifted(targets, chosen_lift, state.lift_state, scale)
        full = dict(zip((p.index for p in projections), lifted, strict=True))
        full |= step.scaled_full_rank(tracker.plan, answers, decay, scale)
        dtypes = None if optimizer is None else [leaf.dtype for leaf in tracker.plan.leaves]
        results = step.delivered(full, answers, updates, params, dtypes)
        fidelity = None
        if metrics:
            fidelity = stack_fidelities([step.compared(t) for t in targets], tracker.plan)
        return results, SubspaceState(tracker_state, inner_state, lift_state, fidelity)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_transformation(name: str, argument: str, value: object, such_as: str) -> None:
    if value is not None and not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{name}: {argument} must be a gradient transformation such as {such_as}, got {value!r}"
        )


def _tracker_in(name: str, state: OptState) -> TrackerState:
    states = find_states(state, TrackerState)
    if len(states) != 1:
        raise ValueError(
            f"{name}: basis must be one tracker, such as lro.refresh_basis(...); got a "
            f"transformation whose state holds {len(states)} trackers"
        )
    return states[0]


def _warn_of_signs(name: str, inner_state: OptState) -> None:
    """Warns if the inner optimizer is Lion."""

    def is_lion(node: object) -> bool:
        return type(node).__name__ == "ScaleByLionState"

    if any(map(is_lion, jax.tree.leaves(inner_state, is_leaf=is_lion))):
        warnings.warn(
            f"{name}: the inner optimizer is Lion, which takes signs inside the subspace; lifting "
            "mixes them, so entries of the update lose their sign and their common size. Take "
            f"signs after the lift, lro.{name}(lro.lion_momentum(), basis, lift=lro.sign_lift()), "
            f"or put Lion behind a filter, optax.chain(lro.{name}(None, basis), optax.lion(...))",
            stacklevel=3,
        )
