"""Lifts: how the inner optimizer's core-sized update becomes a full-sized one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.view import Bases, View


class LiftInput(NamedTuple):
    """What a lift sees of one target.

    Attributes:
        view: how the leaf is read as matrices.
        bases: the current bases, those that lift where the tracker keeps others to project.
        core: the gradient in the subspace.
        update: the inner optimizer's update, of the shape of ``core``, without decay.
        gradient: the leaf-shaped gradient, or None where it never existed.
        gain: scalar, what the inner optimizer makes of a gradient of 1 that has no history:
            minus the learning rate for a complete optimizer, positive for one that a
            learning rate follows. None unless the lift asks for it.
        directions: where the lift's state holds a sketch, the extra directions Q of
            this step, orthonormal and orthogonal to the basis of the same side.
        extra: the gradient's product with them, ``QᵀG`` or ``GQ``.
    """

    view: View
    bases: Bases
    core: jax.Array
    update: jax.Array
    gradient: jax.Array | None
    gain: jax.Array | None = None
    directions: Bases | None = None
    extra: jax.Array | None = None


class Lift(NamedTuple):
    """A lift, as a pair of pure functions.

    Attributes:
        name: for messages.
        init: from the plan to the lift's state, a pytree of arrays.
        update: from one :class:`LiftInput` a target, and the state, to one leaf-shaped
            update a target, and the new state.
        needs_gradient: whether the full gradient is read.
        takes_signs: whether signs of entries are taken after the lift, so that an inner
            optimizer which does so inside the subspace is no mistake.
        needs_gain: whether ``LiftInput.gain`` is read.
        check_inner: raises where the inner optimizer, None for a filter, does not suit; called at
            ``init`` with it and with the shapes of the cores.
    """

    name: str
    init: Callable[[Plan], Any]
    update: Callable[[Sequence[LiftInput], Any], tuple[list[jax.Array], Any]]
    needs_gradient: bool = False
    takes_signs: bool = False
    needs_gain: bool = False
    check_inner: Callable[[Any, Any], None] = lambda inner, cores: None


def subspace_lift() -> Lift:
    r"""GaLore's lift: the update stays in the subspace.

    .. math:: \Delta W = P\,u \quad\text{or}\quad u\,Q^T \quad\text{or}\quad P\,u\,Q^T

    Returns:
        The default lift of :func:`galore_project`. It has no state.

    Example:
        >>> import optax, lowrank_optax as lro
        >>> tx = lro.galore_project(optax.adamw(1e-3), lift=lro.subspace_lift())

    References:
        Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
        <https://arxiv.org/abs/2403.03507>`_, 2024
    """

    def update_fn(targets, state):
        return [t.view.lift(t.update, t.bases) for t in targets], state

    return Lift("subspace_lift", lambda plan: optax.EmptyState(), update_fn)
