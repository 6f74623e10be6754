"""bfloat16 weights that learn from updates too small for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from model.master_weights import (
    PRECISIONS,
    apply_precision,
    float32_master,
    round_stochastically,
    seen_by_optimizer,
    stochastic_rounding,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def train(tx, params, grads, steps):
    state = tx.init(params)

    @jax.jit
    def many(params, state):
        def one(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(one, (params, state), length=steps)[0]

    return many(params, state)


@pytest.fixture(scope="module")
def params():
    start = jax.random.normal(jax.random.key(0), (64, 64)) + 3
    return {"w": start.astype(jnp.bfloat16), "s": jnp.ones((5,), jnp.float32)}


def test_small_updates_are_lost_without_and_kept_with(params):
    grads = jax.tree.map(jnp.ones_like, params)
    sgd = optax.sgd(1e-3)  # an eighth of the spacing of bfloat16 between 2 and 4
    expected = jax.tree.map(lambda x: x.astype(jnp.float32) - 0.1, params)

    plain, _ = train(apply_precision("bfloat16", sgd), params, grads, 100)
    moved = np.abs(plain["w"].astype(np.float32) - params["w"].astype(np.float32))
    assert np.median(moved) == 0

    for name in ("master", "stochastic"):
        new, _ = train(apply_precision(name, sgd), params, grads, 100)
        assert new["w"].dtype == jnp.bfloat16
        error = np.asarray(new["w"].astype(jnp.float32) - expected["w"])
        # Neighbouring bfloat16 numbers are at most 1/32 apart here. To the nearest of them is half
        # of that; random rounding walks a few, and is right on average.
        if name == "master":
            assert np.abs(error).max() < 1 / 63
        else:
            assert abs(error.mean()) < 2e-3
        np.testing.assert_allclose(new["s"], expected["s"], rtol=1e-4)


def test_weights_are_the_rounding_of_their_master(params):
    grads = jax.tree.map(lambda x: x.astype(jnp.float32) * 0.1, params)
    tx = float32_master(optax.adamw(1e-2, weight_decay=0.1))
    new, state = train(tx, params, grads, 20)
    exact, _ = train(optax.adamw(1e-2, weight_decay=0.1), tree_float32(params), grads, 20)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.master, exact)
    np.testing.assert_array_equal(new["w"], state.master["w"].astype(jnp.bfloat16))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.master))


def tree_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def test_the_master_does_not_share_memory_with_the_weights():
    params = {"w": jnp.ones((4, 4))}
    state = jax.jit(float32_master(optax.sgd(0.1)).init)(params)
    assert state.master["w"].unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()


def test_rounding_is_right_on_average_and_to_a_neighbour():
    x = jnp.float32(1) + jnp.arange(0, 8, 1, jnp.float32) / 1024
    many = jax.vmap(lambda key: round_stochastically(x, key))(
        jax.random.split(jax.random.key(0), 4000)
    ).astype(jnp.float32)
    np.testing.assert_allclose(many.mean(0), x, atol=4e-4)
    below = jnp.floor(x * 128) / 128  # the spacing of bfloat16 above 1
    assert np.all((many == below) | (many == below + 1 / 128))
    np.testing.assert_array_equal(many[:, 0], 1.0)  # what is representable stays


def test_rounding_leaves_what_is_not_finite():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, -1.5], jnp.float32)
    rounded = round_stochastically(x, jax.random.key(0))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), x)


def test_noise_differs_by_step_leaf_and_seed(params):
    grads = jax.tree.map(jnp.ones_like, params)
    two = {"a": params["w"], "b": params["w"]}
    ones = {"a": grads["w"], "b": grads["w"]}
    first, _ = train(stochastic_rounding(optax.sgd(1e-3), 0), two, ones, 1)
    again, _ = train(stochastic_rounding(optax.sgd(1e-3), 0), two, ones, 1)
    other, _ = train(stochastic_rounding(optax.sgd(1e-3), 1), two, ones, 1)
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], other["a"])


@pytest.mark.parametrize("name", PRECISIONS)
def test_around_a_subspace_optimizer(name):
    params = {"kernel": jnp.ones((16, 24), PRECISIONS[name])}
    grads = {"kernel": jax.random.normal(jax.random.key(0), (16, 24)).astype(PRECISIONS[name])}
    tx = apply_precision(name, lro.galore_adamw(1e-2, rank=4, refresh_every=2))
    new, state = train(tx, params, grads, 3)
    assert new["kernel"].dtype == PRECISIONS[name]
    assert not np.array_equal(new["kernel"], params["kernel"])
    shape = seen_by_optimizer(name, params["kernel"])
    assert shape.dtype == ("bfloat16" if name == "bfloat16" else "float32")
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, tx.init(params))


@pytest.mark.parametrize("wrap", [float32_master, stochastic_rounding])
def test_params_are_asked_for(wrap, params):
    tx = wrap(optax.sgd(1e-3))
    with pytest.raises(ValueError, match=f"{wrap.__name__} needs params"):
        tx.update(params, tx.init(params))
