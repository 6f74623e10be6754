"""Schedules, and every optimizer that the command line offers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from running import optimizers

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_schedules(shape):
    schedule = optimizers.make_schedule(1.0, steps=50, warmup=10, shape=shape)
    rates = np.array([schedule(step) for step in range(50)])
    assert rates[0] > 0
    assert rates[10] == rates.max() == 1.0
    assert np.all(np.diff(rates[:11]) > 0)
    if shape == "constant":
        np.testing.assert_array_equal(rates[10:], 1.0)
    else:
        assert np.all(np.diff(rates[10:]) <= 0)
        assert 0.1 < rates[-1] < 0.11
    unwarmed = optimizers.make_schedule(1.0, steps=50, warmup=0, shape=shape)
    assert unwarmed(0) == 1.0


@pytest.mark.parametrize("name", optimizers.RECIPES)
def test_every_recipe_trains(name):
    params = {"layers": {"mlp": {"up_proj": {"kernel": jnp.ones((2, 8, 12)) * jnp.eye(8, 12)}}}}
    target = jax.random.normal(jax.random.key(0), (2, 8, 12))

    def distance(params):
        return jnp.mean((params["layers"]["mlp"]["up_proj"]["kernel"] - target) ** 2)

    options = optimizers.Options(rank=0.5, refresh_every=2, weight_decay=0.01)
    tx = optimizers.make(name, optax.constant_schedule(1e-2), options, clip=1.0)
    state, before = tx.init(params), distance(params)
    update = jax.jit(tx.update)
    for _ in range(4):
        updates, state = update(jax.grad(distance)(params), state, params)
        params = optax.apply_updates(params, updates)
    assert distance(params) < before
