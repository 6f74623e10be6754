"""Any optimizer, run inside a subspace of each weight's gradient: track, encode, update, lift.

:func:`subspace_optimizer` is the whole of it; what users call are ``galore_project`` and
``logra_sketch``, which differ in their defaults and in what may stand between encoding and update.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import rebox, unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.tree import find_states
from lowrank_optax._bases.extra_directions import sketched_products
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import check_choice
from lowrank_optax._inner import carry, probe
from lowrank_optax._inner import gain as _gain
from lowrank_optax._subspace import metrics as _metrics
from lowrank_optax._subspace.cores import (
    all_gathered,
    arrays,
    bend,
    encode,
    gathered,
    store,
    zero_cores,
)
from lowrank_optax._subspace.lift import Lift, LiftInput, subspace_lift
from lowrank_optax._subspace.nonlinearity import Nonlinearity
from lowrank_optax._subspace.state import SubspaceState


def _tracker_state(name: str, state: Any) -> TrackerState:
    states = find_states(state, TrackerState)
    if len(states) != 1:
        raise ValueError(
            f"{name}: basis must be one tracker, such as lro.refresh_basis(...); got a "
            f"transformation whose state holds {len(states)} trackers"
        )
    return states[0]


def _warn_of_signs(name: str, inner_state: Any) -> None:
    """Warns if the inner optimizer is Lion."""

    def is_lion(node: Any) -> bool:
        return type(node).__name__ == "ScaleByLionState"

    if any(map(is_lion, jax.tree.leaves(inner_state, is_leaf=is_lion))):
        warnings.warn(
            f"{name}: the inner optimizer is Lion, which takes signs inside the subspace; lifting "
            "mixes them, so entries of the update lose their sign and their common size. Take "
            f"signs after the lift, lro.{name}(lro.lion_momentum(), basis, lift=lro.sign_lift()), "
            f"or put Lion behind a filter, optax.chain(lro.{name}(None, basis), optax.lion(...))",
            stacklevel=3,
        )


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
    for argument, value in (("inner", inner), ("basis", basis)):
        if value is not None and not (hasattr(value, "init") and hasattr(value, "update")):
            raise TypeError(
                f"{name}: {argument} must be a gradient transformation such as "
                f"{'optax.adamw(1e-3)' if argument == 'inner' else 'lro.refresh_basis(rank=128)'}, "
                f"got {value!r}"
            )
    if not callable(moments):
        check_choice(f"{name}: moments", moments, carry.RULES)
    track = optax.with_extra_args_support(basis)
    optimizer = None if inner is None else optax.with_extra_args_support(inner)
    chosen_lift = subspace_lift() if lift is None else lift
    if not isinstance(chosen_lift, Lift):
        raise TypeError(f"{name}: lift must be a lift such as lro.subspace_lift(), got {lift!r}")

    def init_fn(params: Any) -> Any:
        tracker_state = track.init(params)
        tracker = _tracker_state(name, tracker_state)
        cores = zero_cores(tracker.plan, tracker, params)
        chosen_lift.check_inner(optimizer, cores)
        inner_state = None if optimizer is None else optimizer.init(cores)
        if tracker.plan.targets and not chosen_lift.takes_signs:
            _warn_of_signs(name, inner_state)
        return SubspaceState(
            tracker_state=tracker_state,
            inner_state=inner_state,
            lift_state=chosen_lift.init(tracker.plan),
            fidelity=_metrics.empty_fidelity(tracker.plan) if metrics else None,
        )

    def run_inner(cores, state, params, plan, bases, extra_args):
        """The inner update, each leaf's decay in it, and the new inner state.

        A leaf's decay is None, or a scalar coefficient and the core that it multiplied.
        """
        none = [None] * len(plan.leaves)
        if optimizer is None:
            return cores, none, None
        if params is None:
            updates, state = optimizer.update(cores, state, None, **extra_args)
            return updates, none, state
        if not probe.reads_params(optimizer, state, cores, extra_args):
            unread = jax.tree.map(jnp.zeros_like, cores)
            updates, state = optimizer.update(cores, state, unread, **extra_args)
            return updates, none, state
        core_params = store(plan, encode(plan, bases, params), tree.flatten(params)[0])
        coefficients = probe.decay_coefficients(optimizer, state, cores, extra_args)
        updates, state = optimizer.update(cores, state, core_params, **extra_args)
        pairs = zip(arrays(coefficients), arrays(core_params), strict=True)
        decay = [None if c is None else (c.reshape(()), core_param) for c, core_param in pairs]
        return updates, decay, state

    def lift_all(
        plan, bases, gradients, cores, inner_updates, decay, gains, sketched, weights, lift_state
    ):
        """Full-sized updates of the low-rank targets: scaled lift, then unscaled decay."""
        inputs = []
        for number, (index, basis) in enumerate(zip(plan.targets, bases, strict=True)):
            update = inner_updates[index]
            if decay[index] is not None:
                coefficient, core_param = decay[index]
                update = update - coefficient * core_param
            leaf, gradient = plan.leaves[index], gradients[index]
            update = leaf.view.place_core(update, leaf.sides, weights[index])
            if isinstance(gradient, Compact):
                if chosen_lift.needs_gradient:
                    raise ValueError(
                        f"{leaf.path!r}: {chosen_lift.name} needs the full gradient, got a compact "
                        "one; use jax.value_and_grad in place of compact_value_and_grad, or a "
                        "lift that works in the subspace, such as lro.subspace_lift()"
                    )
                gradient = None
            gain = None if gains[index] is None else gains[index].reshape(())
            # What compact gradients bring lies as the state does, on more mesh axes.
            core = leaf.view.place_core(cores[index], leaf.sides, weights[index])
            directions, extra = sketched[number]
            if directions is not None:
                directions = gathered(leaf, directions, weights[index])
                extra = leaf.view.place_core(extra, leaf.sides, weights[index])
            inputs.append(
                LiftInput(leaf.view, basis, core, update, gradient, gain, directions, extra)
            )
        lifted, lift_state = chosen_lift.update(inputs, lift_state)
        updates = {}
        for index, update in zip(plan.targets, lifted, strict=True):
            updates[index] = scale * update
            if decay[index] is not None:
                weight = weights[index].astype(updates[index].dtype)
                updates[index] += decay[index][0] * weight
        return updates, lift_state

    def scale_full_rank(plan, updates, decay):
        """Targets whose subspace is the whole space, P = I: scaled, but for their decay."""
        if isinstance(scale, int | float) and scale == 1:
            return {}
        scaled = {}
        for index, leaf in enumerate(plan.leaves):
            if leaf.is_target and not leaf.is_low_rank:
                update, decayed = updates[index].astype(wide_dtype(updates[index])), 0.0
                if decay[index] is not None:
                    coefficient, weight = (x.astype(update.dtype) for x in decay[index])
                    decayed = coefficient * weight
                scaled[index] = scale * (update - decayed) + decayed
        return scaled

    def fidelity_of(plan, bases, gradients, cores):
        rows = []
        for index, basis in zip(plan.targets, bases, strict=True):
            if isinstance(gradients[index], Compact):
                rows.append(_metrics.UNKNOWN)
                continue
            approximation = plan.leaves[index].view.lift(cores[index], basis)
            rows.append(_metrics.fidelity(gradients[index], cores[index], approximation))
        return _metrics.stack_fidelities(rows, plan)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        before = _tracker_state(name, state.tracker_state)
        # track
        _, tracker_state = track.update(updates, state.tracker_state, params, **extra_args)
        tracker = _tracker_state(name, tracker_state)
        plan = tracker.plan
        like = tree.flatten(updates if params is None else params)[0]
        old = all_gathered(plan, before.encoders(), like)
        bases = all_gathered(plan, tracker.encoders(), like)
        decoders = bases
        if tracker.reduction_decoder is not None:
            decoders = all_gathered(plan, tracker.decoders(), like)
        inner_args = {name: value for name, value in extra_args.items() if name != "bases"}
        # encode
        gradients, encoded = arrays(updates), encode(plan, bases, updates)
        if nonlinearity is not None:
            encoded = bend(plan, nonlinearity, gradients, encoded)
        cores = store(plan, encoded, like)
        # carry
        inner_state = state.inner_state
        if optimizer is not None and plan.targets:
            inner_state = carry.carry(
                moments,
                optimizer,
                inner_state,
                cores,
                carry.Change(plan, bases, old, tracker.refreshes != before.refreshes),
                before.tracker_count,
                inner_args,
            )
        gains = [None] * len(plan.leaves)
        if chosen_lift.needs_gain and plan.targets:
            gains = arrays(_gain.gains(optimizer, inner_state, cores, inner_args))
        # inner
        inner_updates, decay, inner_state = run_inner(
            cores, inner_state, params, plan, bases, inner_args
        )
        # lift
        inner_leaves, weights = arrays(inner_updates), [unbox(leaf) for leaf in like]
        sketched = sketched_products(
            state.lift_state, plan, bases, gradients, before.tracker_count, extra_args.get("bases")
        )
        lifted, lift_state = lift_all(
            plan,
            decoders,
            gradients,
            arrays(encoded),
            inner_leaves,
            decay,
            gains,
            sketched,
            weights,
            state.lift_state,
        )
        lifted |= scale_full_rank(plan, inner_leaves, decay)

        fidelity = fidelity_of(plan, decoders, gradients, arrays(encoded)) if metrics else None
        boxes, treedef = tree.flatten(updates)
        results = tree.flatten(inner_updates)[0]
        for index, update in lifted.items():
            like = gradients[index]
            if isinstance(like, Compact):
                # Of a compact gradient only the parameter knows the form.
                like = update if params is None else weights[index]
                boxes[index] = None if params is None else tree.flatten(params)[0][index]
            dtype = like.dtype if optimizer is None else plan.leaves[index].dtype
            results[index] = rebox(boxes[index], place_like(update.astype(dtype), like))
        state = SubspaceState(tracker_state, inner_state, lift_state, fidelity)
        return tree.unflatten(treedef, results), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
