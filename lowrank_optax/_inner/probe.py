"""Asking an inner optimizer what it would do to a weight of 1 that has no gradient.

An inner optimizer is a black box of two functions. Two things about it must be known all
the same: how strongly it decays weights, since decay must act on the whole weight and not on
its shadow in the subspace; and how fast its moments forget, since their bias must be
undone before they are rotated. Both are seen by running it on *probes*: a tree with the
structure of the cores whose leaves have one element each. Nothing of it is stored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowrank_optax._arrays.boxes import Leaf
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.tree import OptState, Params, PyTree


def probes(cores: PyTree, value: float, size: int = 1) -> PyTree:
    """A tree like ``cores`` of one-element leaves, or of ``size`` along each axis.

    They keep the number of axes, which masks often look at.
    """
    return jax.tree.map(lambda x: jnp.full((size,) * x.ndim, value, x.dtype), cores)


def probe_state(
    inner: optax.GradientTransformation, inner_state: OptState, cores: PyTree
) -> OptState:
    """The inner state at this moment (counts, schedules, hyperparameters), without history."""
    fresh = inner.init(probes(cores, 1.0))
    larger = jax.eval_shape(inner.init, probes(cores, 1.0, size=2))

    # What grows with its leaf is that leaf's history. (A comparison with the state itself
    # would not tell: a core may have one element too.)
    def choose(new: Leaf, grown: Leaf, old: Leaf) -> Leaf:
        shared = new.shape == grown.shape == old.shape and new.dtype == old.dtype
        return old if shared else new

    return jax.tree.map(choose, fresh, larger, inner_state)


def decay_coefficients(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: OptState,
    cores: PyTree,
    extra_args: dict[str, Any],
) -> PyTree:
    """The factor by which the inner optimizer adds each weight to its update.

    For ``optax.adamw(lr, weight_decay=w)`` that is ``-lr * w``.

    Args:
        inner: the inner optimizer.
        inner_state: its state before the update.
        cores: the tree that it will update, for its structure.
        extra_args: the extra arguments of this update.

    Returns:
        A tree like ``cores`` of one-element arrays.
    """
    state = probe_state(inner, inner_state, cores)
    coefficients, _ = inner.update(probes(cores, 0.0), state, probes(cores, 1.0), **extra_args)
    return coefficients


def reads_params(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: OptState,
    cores: PyTree,
    extra_args: dict[str, Any],
) -> bool:
    """Whether the inner optimizer's update depends on params at all, seen from its trace."""

    def update(params):
        return inner.update(cores, inner_state, params, **extra_args)

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cores)
    jaxpr = jax.make_jaxpr(update)(params).jaxpr
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    read |= {id(var) for var in jaxpr.outvars}
    return any(id(var) in read for var in jaxpr.invars)


# optax.MultiSteps lets its optimizer move once in so many steps; this many are waited for.
_LONGEST_WAIT = 4096


def _is_waiting(node: OptState) -> bool:
    return type(node).__name__ == "MultiStepsState"


def _waits(state: OptState) -> list[OptState]:
    nodes = jax.tree.leaves(state, is_leaf=_is_waiting)
    return [node for node in nodes if _is_waiting(node)]


def _from_the_start(state: OptState) -> OptState:
    """The state with every accumulation of gradients begun anew, since its history is gone."""

    def begin(node: OptState) -> OptState:
        if not _is_waiting(node):
            return node
        return node._replace(mini_step=jnp.zeros_like(node.mini_step))

    return jax.tree.map(begin, state, is_leaf=_is_waiting)


def _advance(step: Callable[[OptState], OptState], state: OptState) -> OptState:
    """The state after one step of the moments, through any accumulation of gradients."""
    if not _waits(state):
        return step(state)
    before = [node.gradient_step for node in _waits(state)]

    def unmoved(carry: tuple[OptState, Array]) -> Array:
        state, steps = carry
        still = [node.gradient_step == old for node, old in zip(_waits(state), before, strict=True)]
        return jnp.any(jnp.stack(still)) & (steps < _LONGEST_WAIT)

    start = (state, jnp.zeros([], jnp.int32))
    return jax.lax.while_loop(unmoved, lambda carry: (step(carry[0]), carry[1] + 1), start)[0]


def decay_rates(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: OptState,
    cores: PyTree,
    extra_args: dict[str, Any],
) -> tuple[OptState, OptState]:
    """Two states of the inner optimizer, one and two steps of gradient 1 from a fresh start.

    In them a moment that averages with decay b has grown by the factor 1 + b.
    """
    ones = probes(cores, 1.0)

    def step(state: OptState) -> OptState:
        return inner.update(ones, state, ones, **extra_args)[1]

    after_one = _advance(step, _from_the_start(probe_state(inner, inner_state, cores)))
    return after_one, _advance(step, after_one)


def outer_decay_rates(
    tx: optax.GradientTransformation, params: Params
) -> tuple[OptState, OptState]:
    """Like :func:`decay_rates`, of a whole optimizer: it sees one-element weights.

    Args:
        tx: an optimizer. Weights of one element are no targets, so it keeps its moments in
            the weights' own shape.
        params: the tree that it updates, for its structure.

    Returns:
        The two states.
    """
    outer = optax.with_extra_args_support(tx)
    ones = jax.tree.map(lambda x: jnp.ones((1,) * x.ndim, wide_dtype(x)), params)

    def step(state: OptState) -> OptState:
        return outer.update(ones, state, ones)[1]

    after_one = _advance(step, outer.init(ones))
    return after_one, _advance(step, after_one)
