"""A policy and what it sampled, for the tests of rollouts and of learning from them."""

import functools

import jax
import jax.numpy as jnp
import pytest

from model.decoder import DecoderConfig
from reinforcement.rollouts import actor_critic, roll_out
from reinforcement.tasks import Paths
from tests.helpers.data import normal

CONFIG = DecoderConfig(20, 16, 24, 1, 2, 2, max_position_embeddings=10)


@pytest.fixture(scope="module")
def acting(standard_promotion):
    """A task, its policy with a value head that is not 0, and two sets of parameters."""
    task = Paths(0)
    init, policy = actor_critic(CONFIG)
    params, other = (
        init(jax.random.key(seed)) | {"value_head": {"kernel": normal(seed, (16, 1))}}
        for seed in (0, 1)
    )
    return task, policy, params, other


@pytest.fixture(scope="module")
def rollouts(acting):
    task, policy, params, other = acting
    prompts = jnp.asarray(task.train_prompts[:32])
    run = jax.jit(functools.partial(roll_out, task, policy))
    return run(params, other, prompts, jax.random.key(2))
