"""When the guard goes back to the best state, and to which."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforcement.guard import GuardOptions, Learner, start_guard, watch

pytestmark = pytest.mark.usefixtures("standard_promotion")


def learner(number: float) -> Learner:
    tree = {"w": jnp.full(3, float(number))}
    return Learner(tree, tree, jnp.ones([]), jnp.asarray(0.005))


def guarded(options, rewards, losses=None):
    """Feeds a guard with rewards of states that are numbered 0, 1, …; where it went on from."""
    jitted = jax.jit(functools.partial(watch, options))
    guard = start_guard(learner(0.0))
    found = []
    for number, reward in enumerate(rewards):
        loss = jnp.asarray(0.0 if losses is None else losses[number])
        guard, after, restored = jitted(
            guard, learner(number), learner(number + 0.5), jnp.asarray(reward), loss
        )
        found.append((after, bool(restored)))
    return guard, found


def test_a_collapsed_run_goes_back_to_the_best_state():
    # Running rewards at a memory of .5: .4, .6, .7, .65, .325
    guard, found = guarded(GuardOptions(0.8, 0.5), [0.4, 0.8, 0.8, 0.6, 0.0])
    assert [restored for _, restored in found] == [False, False, False, False, True]
    assert [float(after.params["w"][0]) for after, _ in found] == [0.5, 1.5, 2.5, 3.5, 2.0]
    after = found[-1][0]
    np.testing.assert_array_equal(after.opt_state["w"], 2.0)
    assert (float(after.step_scale), guard.restores) == (0.5, 1)
    np.testing.assert_allclose(after.kl_weight, 0.02)  # twice .005 is below the least
    np.testing.assert_allclose([guard.best, guard.average], 0.7, rtol=1e-6)


def test_a_loss_that_is_not_finite_goes_back_whatever_the_reward():
    _, found = guarded(GuardOptions(0.8, 0.5), [0.5, 0.6, 0.7], [0.0, 0.0, float("nan")])
    assert [restored for _, restored in found] == [False, False, True]
    np.testing.assert_array_equal(found[-1][0].params["w"], 1.0)


def test_noise_and_low_rewards_are_no_collapse():
    _, found = guarded(GuardOptions(0.7, 0.7), [0.0, 0.02, 0.0, 0.5, 0.4, 0.5, 0.35])
    assert not any(restored for _, restored in found)


def test_no_guard_keeps_what_came():
    _, found = guarded(GuardOptions(collapse=0.0), [1.0, 0.0, 0.0], [0.0, 0.0, float("nan")])
    assert [float(after.params["w"][0]) for after, _ in found] == [0.5, 1.5, 2.5]
