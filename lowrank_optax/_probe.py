"""Asking an inner optimizer what it would do to a weight of 1 that has no gradient.

An inner optimizer is a black box of two functions. Two things about it must be known all
the same: how strongly it decays weights, since decay must act on the whole weight and not on
its shadow in the subspace; and how fast its moments forget, since their bias must be
undone before they are rotated. Both are seen by running it on *probes*: a tree with the
structure of the cores whose leaves have one element each. Nothing of it is stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def probes(cores: Any, value: float) -> Any:
    """A tree like ``cores`` of one-element leaves.

    They keep the number of axes, which masks often look at.
    """
    return jax.tree.map(lambda x: jnp.full((1,) * x.ndim, value, x.dtype), cores)


def probe_state(inner: optax.GradientTransformation, inner_state: Any, cores: Any) -> Any:
    """The inner state at this moment (counts, schedules, hyperparameters), without history."""
    fresh = inner.init(probes(cores, 1.0))
    # What has another shape for a probe than for a core belongs to one leaf: its history.
    return jax.tree.map(
        lambda new, old: old if new.shape == old.shape and new.dtype == old.dtype else new,
        fresh,
        inner_state,
    )


def decay_coefficients(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: Any,
    cores: Any,
    extra_args: dict[str, Any],
) -> Any:
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
    inner_state: Any,
    cores: Any,
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


def decay_rates(
    inner: optax.GradientTransformationExtraArgs,
    inner_state: Any,
    cores: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Two states of the inner optimizer, one and two steps of gradient 1 from a fresh start.

    In them a moment that averages with decay b has grown by the factor 1 + b.
    """
    state = probe_state(inner, inner_state, cores)
    ones = probes(cores, 1.0)
    _, after_one = inner.update(ones, state, ones, **extra_args)
    _, after_two = inner.update(ones, after_one, ones, **extra_args)
    return after_one, after_two
