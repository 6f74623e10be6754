"""Training runs of ``gradient_compression.py``, one method each, and the times of their steps."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import harness
from benchmarks.compression.methods import methods
from benchmarks.compression.task import Size, make_task
from running.optimizers import make_schedule
from running.training import count_bytes

SAMPLE_EVERY = 20


class Compiled(NamedTuple):
    """What one method runs, for all learning rates and seeds.

    Attributes:
        init: from params to the optimizer state.
        step: one update of ``(params, state)``, which are donated, given tokens and a rate.
        measure: norms of the gradient, of what is seen of it and of their difference; and the
            product of the first two.
        peak_bytes: of the step.
    """

    init: Callable
    step: Callable
    measure: Callable
    peak_bytes: int


@functools.cache
def compiled(name: str, size: Size) -> Compiled:
    """Compiles a method's functions."""
    init, loss, corpus = make_task(size)
    method = methods(size)[name]
    shape = make_schedule(1.0, size.steps, min(20, size.steps // 10), "cosine")

    def optimizer(rate):
        # The rate is an argument of the step, so that one compilation serves all.
        return method.make(lambda count: rate * shape(count))

    def step(params, state, tokens, rate):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer(rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def measure(params, state, tokens, rate):
        tx, grads = optimizer(rate), jax.grad(loss)(params, tokens)
        _, after = tx.update(grads, state, params)
        true, seen = method.seen(grads, state, after)
        lost = jax.tree.map(jnp.subtract, true, seen)
        norms = map(optax.tree.norm, (true, seen, lost))
        return (*norms, optax.tree.vdot(true, seen))

    params = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(optimizer(0.0).init, params)
    shapes = params, state, corpus.batch(0, 0, size.batch), jnp.float32(0)
    stepped = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
    measured = jax.jit(measure).lower(*shapes).compile()
    return Compiled(jax.jit(optimizer(0.0).init), stepped, measured, harness.peak_bytes(stepped))


def run(name: str, rate: float, seed: int, size: Size) -> dict[str, Any]:
    """Trains once."""
    init, loss, corpus = make_task(size)
    functions = compiled(name, size)
    params = init(jax.random.key(seed))
    state = functions.init(params)
    rate = jnp.float32(rate)
    distortions, cosines = [], []
    for number in range(size.steps):
        tokens = corpus.batch(seed, number, size.batch)
        if number % SAMPLE_EVERY == 0:
            norms = functions.measure(params, state, tokens, rate)
            true, seen, lost, dot = map(float, norms)
            distortions.append(lost / true)
            cosines.append(dot / (true * seen) if seen else 0.0)
        params, state, _ = functions.step(params, state, tokens, rate)
    batches = list(corpus.validation_batches(size.batch))
    total = sum(float(loss(params, batch)) * len(batch) for batch in batches)
    return {
        "score": total / sum(map(len, batches)),
        "state_bytes": count_bytes(state),
        "peak_bytes": functions.peak_bytes,
        "distortion": statistics.mean(distortions),
        "cosine": statistics.mean(cosines),
    }


def time_steps(names: list[str], rounds: int, size: Size) -> dict[str, list[float]]:
    """Seconds of ten steps, by method: one entry a round, in which all take turns."""
    init, _, corpus = make_task(size)
    tokens, rate = corpus.batch(0, 0, size.batch), jnp.float32(1e-3)
    turns = {}
    for name in names:
        params = init(jax.random.key(0))
        turns[name] = params, compiled(name, size).init(params)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # Every other round backwards, so that nobody always runs after the same neighbour.
        for name in names if number % 2 == 0 else names[::-1]:
            step, (params, state), value = compiled(name, size).step, turns[name], None
            begin = time.perf_counter()
            for _ in range(10):
                params, state, value = step(params, state, tokens, rate)
            jax.block_until_ready(value)
            seconds[name].append(time.perf_counter() - begin)
            turns[name] = params, state
    return seconds
