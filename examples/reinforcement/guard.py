"""Guarding against collapse: notice that the reward has fallen, and go back to a good state.

A policy that steps too far samples answers that earn nothing; then nothing tells it the way back,
and it stays there. `watch` remembers the best state seen. Once the running reward has lost a
given share of its best, or the loss is no longer finite, it restores that state, with half the
step and twice the weight on the divergence from the reference.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from model.decoder import Params


class Learner(NamedTuple):
    """What updates change, and the two numbers that the guard changes.

    Attributes:
        params: of the policy.
        opt_state: of the optimizer.
        step_scale: factor on every update.
        kl_weight: of the divergence from the reference in the loss.
    """

    params: Params
    opt_state: optax.OptState
    step_scale: jax.Array
    kl_weight: jax.Array


@dataclasses.dataclass(frozen=True)
class GuardOptions:
    """When to go back.

    Attributes:
        collapse: share of the best running reward below which the run has collapsed; 0 never.
        memory: weight of the past in the running reward.
        least_kl_weight: that ``kl_weight`` has after going back.
    """

    collapse: float = 0.7
    memory: float = 0.7
    least_kl_weight: float = 0.02


class Guard(NamedTuple):
    """What is remembered.

    Attributes:
        average: the running reward; negative before the first one.
        best: its largest value.
        params: those that had it, before they were updated. This is a second copy of the model and
            of the optimizer's state; where memory is short, keep it on disk.
        opt_state: likewise.
        restores: how often they were restored.
    """

    average: jax.Array
    best: jax.Array
    params: Params
    opt_state: optax.OptState
    restores: jax.Array


def start_guard(learner: Learner) -> Guard:
    """Remembers the first state."""
    learner = jax.tree.map(jnp.copy, learner)
    average, best = (jnp.full([], -1.0, jnp.float32) for _ in range(2))
    return Guard(average, best, learner.params, learner.opt_state, jnp.zeros([], jnp.int32))


def watch(
    options: GuardOptions,
    guard: Guard,
    before: Learner,
    after: Learner,
    reward: jax.Array,
    loss: jax.Array,
) -> tuple[Guard, Learner, jax.Array]:
    """Judges an iteration by the reward of its rollouts.

    Args:
        options: when to go back.
        guard: what is remembered.
        before: the state that earned the reward.
        after: the state that came of it.
        reward: the mean over the rollouts.
        loss: the mean over the updates.

    Returns:
        What to remember, the state to go on with, and whether it is an earlier one.
    """
    if not options.collapse:
        return guard, after, jnp.zeros([], bool)
    memory = options.memory
    average = jnp.where(guard.average < 0, reward, memory * guard.average + (1 - memory) * reward)
    collapsed = (average < options.collapse * guard.best) | ~jnp.isfinite(loss)

    def go_back() -> tuple[Guard, Learner]:
        learner = Learner(
            jax.tree.map(jnp.copy, guard.params),
            jax.tree.map(jnp.copy, guard.opt_state),
            after.step_scale / 2,
            jnp.maximum(2 * after.kl_weight, options.least_kl_weight),
        )
        return guard._replace(average=guard.best, restores=guard.restores + 1), learner

    def go_on() -> tuple[Guard, Learner]:
        better = average >= guard.best
        params, opt_state = jax.lax.cond(
            better,
            lambda: (before.params, before.opt_state),
            lambda: (guard.params, guard.opt_state),
        )
        best = jnp.maximum(average, guard.best)
        return Guard(average, best, params, opt_state, guard.restores), after

    new_guard, learner = jax.lax.cond(collapsed, go_back, go_on)
    return new_guard, learner, collapsed
