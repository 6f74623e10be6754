"""The stages of one update: each a function from targets to targets that know more.

What is known of a target grows from stage to stage: its bases (track), its core (encode), the inner
optimizer's answer (inner), the full-sized update (lift). :class:`TargetStep` is that knowledge.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from lowrank_optax._arrays.boxes import MaybeBox, rebox, unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.tree import OptState, PyTree, find_states, flatten, unflatten
from lowrank_optax._bases.extra_directions import ExtraDirections
from lowrank_optax._bases.gradient import Gradient
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner import probe
from lowrank_optax._inner.gain import gains
from lowrank_optax._plan.plan import Plan, Projection
from lowrank_optax._plan.view import Bases
from lowrank_optax._subspace.cores import arrays, gathered, with_cores
from lowrank_optax._subspace.lift import Lift, LiftInput
from lowrank_optax._subspace.metrics import UNKNOWN, Fidelity, fidelity
from lowrank_optax._subspace.nonlinearity import Nonlinearity


class Decay(NamedTuple):
    """A weight decay that an inner optimizer has put into its update of one leaf.

    Attributes:
        coefficient: scalar, by which the weight is multiplied.
        weight: what the inner optimizer took for the weight: a core, or the weight itself.
    """

    coefficient: Array
    weight: Array


class TargetStep(NamedTuple):
    """One target in the course of one update.

    Attributes:
        projection: the target.
        weight: its array in params; in updates, if there are no params.
        gradient: its gradient.
        bases: what projects, now.
        decoders: what lifts, now.
        core: the gradient in the subspace, as the lift sees it.
        directions: the extra directions of this step, where the lift asks for some.
        extra: the gradient's product with them.
        update: the inner optimizer's answer to the core.
        decay: the weight decay in it.
        gain: scalar, the inner optimizer's answer to a gradient of 1 without history.
    """

    projection: Projection
    weight: Array
    gradient: Gradient
    bases: Bases
    decoders: Bases
    core: Any = None
    directions: Bases | None = None
    extra: Array | None = None
    update: Any = None
    decay: Decay | None = None
    gain: Array | None = None


def bases_of(tracker: TrackerState, like: Sequence[MaybeBox]) -> list[Bases]:
    """The bases of each target in a tracker's state, where they are used."""
    pairs = zip(tracker.plan.projections, tracker.encoders(), strict=True)
    return [gathered(p, bases, unbox(like[p.index])) for p, bases in pairs]


def tracked(tracker: TrackerState, updates: PyTree, like: Sequence[MaybeBox]) -> list[TargetStep]:
    """The targets with their gradients and with the bases of now."""
    gradients = arrays(updates)
    tracker.plan.check_count(gradients, "updates")
    tracker.plan.check_count(like, "updates or params")
    targets = []
    for projection, bases in zip(tracker.plan.projections, bases_of(tracker, like), strict=True):
        weight = unbox(like[projection.index])
        gradient = Gradient(projection, gradients[projection.index])
        targets.append(TargetStep(projection, weight, gradient, bases, bases))
    if tracker.reduction_decoder is None:
        return targets
    pairs = zip(targets, tracker.decoders(), strict=True)
    return [t._replace(decoders=gathered(t.projection, lifts, t.weight)) for t, lifts in pairs]


def encoded(targets: Sequence[TargetStep], nonlinearity: Nonlinearity | None) -> list[TargetStep]:
    """The targets with their cores."""
    return [t._replace(core=_core(t, nonlinearity)) for t in targets]


def _core(target: TargetStep, nonlinearity: Nonlinearity | None) -> Float[Array, "..."]:
    core = target.gradient.core(target.bases)
    if nonlinearity is None:
        return core
    full = None
    if nonlinearity.needs_gradient:
        reader = f"nonlinearity={nonlinearity.name!r}"
        full = target.gradient.full(reader, ", or another nonlinearity")
    return nonlinearity.apply(target.projection.view, target.projection.sides, core, full)


def sketched(
    targets: Sequence[TargetStep], lift_state: OptState, count: Array, given: Any
) -> list[TargetStep]:
    """The targets with this step's extra directions, where the lift's state asks for some.

    Args:
        targets: the targets.
        lift_state: the lift's state.
        count: int32 scalar, updates before this one.
        given: what came beside compact gradients, or None.
    """
    targets = list(targets)
    for asked in find_states(lift_state, ExtraDirections):
        full = [t for t in targets if t.gradient.is_full]
        drawn = asked.draw([t.projection for t in full], [t.bases for t in full], count)
        at_full = {t.projection.number: q for t, q in zip(full, drawn, strict=True)}
        for number, target in enumerate(targets):
            value, view = target.gradient.value, target.projection.view
            if isinstance(value, Compact):
                extra = _checked_extra(asked, target.projection, value.extra)
                directions = given.directions[target.projection.path]
            else:
                directions = at_full[target.projection.number]
                extra = view.project(value, directions)
            targets[number] = target._replace(directions=directions, extra=extra)
    return targets


def _checked_extra(asked: ExtraDirections, projection: Projection, extra: Array | None) -> Array:
    expected = projection.view.core_shape(projection.sides, asked.columns(projection))
    if extra is None or extra.shape != expected:
        raise ValueError(
            f"{projection.path!r}: the lift reads the gradient in extra directions, products of "
            f"shape {expected}, but this compact gradient has "
            f"{None if extra is None else extra.shape}; compute gradients with the opt_state that "
            "you update"
        )
    return extra


def answered(
    targets: Sequence[TargetStep],
    optimizer: optax.GradientTransformationExtraArgs | None,
    cores: PyTree,
    state: OptState,
    params: PyTree | None,
    extra_args: dict[str, Any],
) -> tuple[PyTree, list[Decay | None], Any]:
    """The inner optimizer's answer: a tree of updates, the decay of each leaf, its new state."""
    none: list[Decay | None] = [None] * len(flatten(cores)[0])
    if optimizer is None:
        return cores, none, None
    if params is None:
        updates, state = optimizer.update(cores, state, None, **extra_args)
        return updates, none, state
    if not probe.reads_params(optimizer, state, cores, extra_args):
        unread = jax.tree.map(jnp.zeros_like, cores)
        updates, state = optimizer.update(cores, state, unread, **extra_args)
        return updates, none, state
    projections = [t.projection for t in targets]
    weights = [t.projection.view.project(t.weight, t.bases) for t in targets]
    core_params = with_cores(params, projections, weights, flatten(params)[0])
    coefficients = probe.decay_coefficients(optimizer, state, cores, extra_args)
    updates, state = optimizer.update(cores, state, core_params, **extra_args)
    pairs = zip(arrays(coefficients), arrays(core_params), strict=True)
    decay = [None if c is None else Decay(c.reshape(()), weight) for c, weight in pairs]
    return updates, decay, state


def with_answers(
    targets: Sequence[TargetStep], answers: PyTree, decay: Sequence[Decay | None]
) -> list[TargetStep]:
    """The targets with the inner optimizer's answers and the decay in them."""
    found = arrays(answers)
    return [
        t._replace(update=found[t.projection.index], decay=decay[t.projection.index])
        for t in targets
    ]


def with_gains(
    targets: Sequence[TargetStep],
    optimizer: optax.GradientTransformationExtraArgs | None,
    cores: PyTree,
    state: OptState,
    extra_args: dict[str, Any],
) -> list[TargetStep]:
    """The targets with the inner optimizer's answer to a gradient of 1."""
    found = arrays(gains(optimizer, state, cores, extra_args)) if targets else []
    return [t._replace(gain=found[t.projection.index].reshape(())) for t in targets]


def lifted(
    targets: Sequence[TargetStep], lift: Lift, lift_state: OptState, scale: Any
) -> tuple[list[Array], Any]:
    """The full-sized update of each target, a scaled lift and unscaled decay; the lift's state."""
    outputs, lift_state = lift.update([_lift_input(t, lift) for t in targets], lift_state)
    updates = []
    for target, output in zip(targets, outputs, strict=True):
        update = scale * output
        if target.decay is not None:
            update += target.decay.coefficient * target.weight.astype(update.dtype)
        updates.append(update)
    return updates, lift_state


def _lift_input(target: TargetStep, lift: Lift) -> LiftInput:
    view, sides = target.projection.view, target.projection.sides
    full = None if isinstance(target.gradient.value, Compact) else target.gradient.value
    if lift.needs_gradient:
        advice = ", or a lift that works in the subspace, such as lro.subspace_lift()"
        full = target.gradient.full(lift.name, advice)
    update = target.update
    if target.decay is not None:
        update = update - target.decay.coefficient * target.decay.weight

    # What compact gradients bring lies as the state does, on more mesh axes.
    def placed(core: Array) -> Array:
        return view.place_core(core, sides, target.weight)

    directions, extra = target.directions, target.extra
    if directions is not None and extra is not None:
        directions = gathered(target.projection, directions, target.weight)
        extra = placed(extra)
    core, update = placed(target.core), placed(update)
    return LiftInput(view, target.decoders, core, update, full, target.gain, directions, extra)


def scaled_full_rank(
    plan: Plan, answers: PyTree, decay: Sequence[Decay | None], scale: Any
) -> dict[int, Array]:
    """The updates of targets whose subspace is the whole space, P = I: scaled, but for their decay.

    Args:
        plan: what is projected.
        answers: the inner optimizer's updates.
        decay: the decay in that of each leaf.
        scale: the factor.

    Returns:
        Updates by the number of the leaf; none where the scale changes nothing.
    """
    if isinstance(scale, int | float) and scale == 1:
        return {}
    updates, scaled = arrays(answers), {}
    for index, leaf in enumerate(plan.leaves):
        if leaf.is_target and not leaf.sides:
            update, here = updates[index].astype(wide_dtype(updates[index])), decay[index]
            decayed = jnp.zeros_like(update)
            if here is not None:
                decayed = here.coefficient.astype(update.dtype) * here.weight.astype(update.dtype)
            scaled[index] = scale * (update - decayed) + decayed
    return scaled


def delivered(
    full: Mapping[int, Array],
    answers: PyTree,
    updates: PyTree,
    params: PyTree | None,
    dtypes: Sequence[str] | None,
) -> PyTree:
    """The inner optimizer's updates with full-sized ones put in their places.

    Args:
        full: full-sized updates by the number of the leaf.
        answers: the inner optimizer's updates.
        updates: the gradients.
        params: the parameters, which alone know the form of a compact gradient; or None.
        dtypes: of every leaf's update; None for those of gradients.
    """
    results, treedef = flatten(answers)
    gradients = flatten(updates)[0]
    weights = gradients if params is None else flatten(params)[0]
    for index, update in full.items():
        box = gradients[index]
        if isinstance(box, Compact):
            box = None if params is None else weights[index]
        like = update if box is None else unbox(box)
        dtype = like.dtype if dtypes is None else dtypes[index]
        results[index] = rebox(box, place_like(update.astype(dtype), like))
    return unflatten(treedef, results)


def compared(target: TargetStep) -> Fidelity:
    """How well the subspace stands for a target's gradient."""
    if isinstance(target.gradient.value, Compact):
        return UNKNOWN
    approximation = target.projection.view.lift(target.core, target.decoders)
    return fidelity(target.gradient.value, target.core, approximation)
