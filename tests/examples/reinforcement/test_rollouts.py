"""The policy with its value head, and what it samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.decoder import DecoderConfig
from reinforcement.rollouts import actor_critic, complete

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_the_value_head_reads_the_features_that_the_logits_read(acting):
    _, policy, params, _ = acting
    tokens = jnp.arange(8)[None]
    logits, values = policy(params, tokens)
    assert (logits.shape, values.shape) == ((1, 8, 20), (1, 8))
    column = params["lm_head"]["kernel"][:, 3:4]
    _, same = policy(params | {"value_head": {"kernel": column}}, tokens)
    np.testing.assert_allclose(same, logits[..., 3], rtol=1e-5)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        actor_critic(DecoderConfig.tiny())


def test_rollouts_record_what_the_policy_says_of_its_own_completions(acting, rollouts):
    task, policy, params, other = acting
    np.testing.assert_array_equal(rollouts.tokens[:, :2], task.train_prompts[:32])
    np.testing.assert_array_equal(rollouts.rewards, task.score(rollouts.tokens).rewards)
    for found, given in ((rollouts.log_probs, params), (rollouts.reference_log_probs, other)):
        for position in (2, 9):  # the first token that was sampled, and the last
            logits, values = policy(given, rollouts.tokens[:, :position])
            log_probs = jax.nn.log_softmax(logits[:, -1])
            chosen = np.take_along_axis(log_probs, rollouts.tokens[:, position, None], 1)[:, 0]
            np.testing.assert_allclose(found[:, position - 2], chosen, rtol=1e-4)
            if given is params:
                np.testing.assert_allclose(
                    rollouts.values[:, position - 2], values[:, -1], rtol=1e-4, atol=1e-5
                )


def test_samples_follow_the_policy(acting):
    _, policy, params, _ = acting
    prompts = jnp.tile(jnp.array([[3, 7]]), (4000, 1))
    tokens = jax.jit(functools.partial(complete, policy), static_argnums=2)(
        params, prompts, 1, jax.random.key(0)
    )
    shares = np.bincount(tokens[:, 2], minlength=20) / 4000
    expected = jax.nn.softmax(policy(params, prompts[:1])[0][0, -1])
    np.testing.assert_allclose(shares, expected, atol=0.03)
