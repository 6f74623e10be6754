"""Loops that tests train and track with."""

import functools

import jax
import numpy as np
import optax


def relaxed(tx):
    """An optimizer of optax, some of whose arithmetic mixes dtypes, under usual promotion.

    Everything around it, this library included, stays under the strict promotion of the
    tests.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def _tracking(tracker):
    @jax.jit
    def run(params, gradients):
        def step(state, gradient):
            _, state = tracker.update(gradient, state)
            return state, state

        state = tracker.init(params)
        return state, jax.lax.scan(step, state, gradients)[1]

    return run


def track(tracker, params, gradients):
    """The states of a tracker before the first and after every step, stacked.

    Compiled once for each tracker object and kind of gradients.
    """
    start, states = _tracking(tracker)(params, gradients)
    return jax.tree.map(lambda a, b: np.concatenate([np.asarray(a)[None], b]), start, states)


@functools.cache
def _running(tx, apply):
    @jax.jit
    def loop(params, state, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            after = optax.apply_updates(params, updates) if apply else params
            return (after, state), (updates, state, params)

        return jax.lax.scan(step, (params, state), gradients)

    return loop


def run(tx, params, gradients, apply=True):
    """All updates, all states (the first one included) and the params that each step saw.

    One compiled loop for each optimizer object, whose carry must keep its types.
    """
    start = tx.init(params)
    _, (updates, states, seen) = _running(tx, apply)(params, start, gradients)
    states = jax.tree.map(lambda a, b: np.concatenate([np.asarray(a)[None], b]), start, states)
    return updates, states, seen


def train(tx, params, gradient_fn, steps, **extra_args):
    """Losses of all steps, then the params and the state at the end: one compiled loop."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(params, state, steps):
        def step(carry, _):
            params, state = carry
            loss, gradients = gradient_fn(params)
            extra = {"value": loss} if extra_args.get("value") else {}
            updates, state = tx.update(gradients, state, params, **extra)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), length=steps)

    (params, state), losses = run(params, tx.init(params), steps)
    return np.asarray(losses), params, state
