"""The formulas of PPO and GRPO against hand-computed numbers and plain loops."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reinforcement import losses


def ragged(rng, batch=4, length=6):
    """Masks whose rows have 1 to ``length`` actions at their start."""
    lengths = rng.integers(1, length + 1, batch)
    return np.arange(length) < lengths[:, None]


def test_rewards_go_to_the_last_action():
    mask = jnp.array([[True, True, False], [True, True, True], [True, False, False]])
    rewards = losses.at_the_end(jnp.array([0.5, 1.0, 2.0]), mask)
    np.testing.assert_array_equal(rewards, [[0, 0.5, 0], [0, 0, 1], [2, 0, 0]])


def test_advantages_by_hand():
    # δ = (0 + .5·2 − 1, 4 + 0 − 2) = (0, 2); A₁ = 2, A₀ = 0 + .5·.8·2 = .8
    rewards, values = jnp.array([[0.0, 4.0, 9.0]]), jnp.array([[1.0, 2.0, 7.0]])
    mask = jnp.array([[True, True, False]])
    advantages, returns = losses.generalized_advantages(rewards, values, mask, 0.5, 0.8)
    np.testing.assert_allclose(advantages, [[0.8, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[1.8, 4.0, 0.0]], rtol=1e-6)


@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_discounted_sums_of_temporal_differences(seed, discount, decay):
    rng = np.random.default_rng(seed)
    mask = ragged(rng)
    rewards, values = rng.normal(size=(2, *mask.shape))
    expected = np.zeros(mask.shape)
    for row in range(len(mask)):
        count = mask[row].sum()
        following = [*values[row, 1:count], 0.0]
        deltas = rewards[row, :count] + discount * np.array(following) - values[row, :count]
        for t in range(count):
            powers = (discount * decay) ** np.arange(count - t)
            expected[row, t] = np.sum(powers * deltas[t:])
    arrays = (jnp.asarray(x, jnp.float32) for x in (rewards, values))
    advantages, returns = losses.generalized_advantages(*arrays, jnp.asarray(mask), discount, decay)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), atol=1e-5)


def test_without_values_and_decay_the_return_is_the_reward():
    mask = jnp.array([[True, True, True, False]])
    rewards = losses.at_the_end(jnp.array([0.7]), mask)
    advantages, _ = losses.generalized_advantages(rewards, jnp.zeros((1, 4)), mask, 1.0, 1.0)
    np.testing.assert_allclose(advantages, [[0.7, 0.7, 0.7, 0.0]], rtol=1e-6)


def test_groups_are_compared_with_themselves_only():
    rewards = jnp.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 4.0])
    advantages = losses.group_advantages(rewards, 4)
    np.testing.assert_allclose(advantages[:4], [-1, 1, 1, -1], rtol=1e-3)
    np.testing.assert_array_equal(advantages[4:8], 0)  # all right: nothing to learn
    np.testing.assert_allclose(advantages[8:], np.array([-1, -1, -1, 3]) / 3**0.5, rtol=1e-3)


def test_whitening_sees_actions_only():
    mask = jnp.array([[True, True, False], [True, True, False]])
    x = jnp.array([[1.0, 2.0, 50.0], [3.0, 6.0, -50.0]])
    white = losses.whiten(x, mask)
    np.testing.assert_array_equal(white[:, 2], 0)
    np.testing.assert_allclose(white[:, :2], (np.array([[1, 2], [3, 6]]) - 3) / 3.5**0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "moves"),
    [
        (1.0, 2.0, 2.0, True),
        (1.5, 2.0, 2.4, False),  # up enough: no more to gain
        (0.5, 2.0, 1.0, True),  # down, though it is good: pulled back in full
        (1.5, -2.0, -3.0, True),
        (0.5, -2.0, -1.6, False),
    ],
)
def test_clipped_ratio(ratio, advantage, gain, moves):
    mask = jnp.array([[True, False]])
    advantages = jnp.array([[advantage, 5.0]])

    def loss(log_ratio):
        return losses.clipped_ratio_loss(log_ratio, advantages, mask, 0.2)

    value, gradient = jax.value_and_grad(loss)(jnp.array([[np.log(ratio), 300.0]], jnp.float32))
    np.testing.assert_allclose(value, -gain, rtol=1e-6)
    expected = -ratio * advantage if moves else 0.0
    np.testing.assert_allclose(gradient, [[expected, 0.0]], rtol=1e-6)


def test_log_probs_are_those_of_the_tokens():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    tokens = jnp.array([[0, 4, 2], [1, 1, 3]])
    expected = -optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    np.testing.assert_allclose(losses.token_log_probs(logits, tokens), expected, rtol=1e-5)


def test_kl_estimate_has_the_true_divergence_as_its_mean():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), 2)
    exact = np.sum(p * np.log(p / q))
    # Each token as often as the policy samples it: the estimate is then exact.
    tokens = np.repeat(np.arange(6), np.round(p * 100_000).astype(int))[None]
    own, other = (jnp.asarray(np.log(x)[tokens], jnp.float32) for x in (p, q))
    mask = jnp.ones(tokens.shape, bool)
    assert exact > 0.1
    np.testing.assert_allclose(losses.kl_estimate(own, other, mask), exact, rtol=1e-3)
    assert losses.kl_estimate(own, own, mask) == 0


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_kl_estimate_is_never_negative_and_ignores_what_is_masked(seed):
    rng = np.random.default_rng(seed)
    mask = ragged(rng)
    own, other = rng.normal(size=(2, *mask.shape)).astype(np.float32)
    estimate = losses.kl_estimate(*map(jnp.asarray, (own, other, mask)))
    assert estimate >= 0
    far = np.where(mask, other, 500.0).astype(np.float32)
    np.testing.assert_array_equal(estimate, losses.kl_estimate(*map(jnp.asarray, (own, far, mask))))


def test_masked_mean_of_nothing_is_zero():
    assert losses.masked_mean(jnp.ones((2, 2)), jnp.zeros((2, 2), bool)) == 0
