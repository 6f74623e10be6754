"""The baselines must be fair: what they round and leave out is what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.compression import baselines
from tests.helpers.data import normal
from tests.helpers.loops import relaxed


@pytest.mark.parametrize("shape", [(7,), (16, 24), (2, 3, 50)])
def test_float8_is_as_close_as_three_bits_allow(shape):
    x = normal(0, shape) * jnp.exp(3 * normal(1, shape))
    blocks = baselines.quantize(x, 16, jax.random.key(0))
    assert blocks.codes.dtype == jnp.float8_e4m3fn
    assert blocks.codes.shape[1] == 16
    back = np.asarray(baselines.dequantize(blocks, shape))
    # One step of a float with three bits, and of the smallest numbers in their block.
    scales = np.repeat(np.asarray(blocks.scales)[:, 0], 16)[: back.size].reshape(shape)
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 8, scales * 2.0**-9) * 1.001).all()
    zero = baselines.quantize(jnp.zeros(shape), 16, jax.random.key(0))
    np.testing.assert_array_equal(baselines.dequantize(zero, shape), 0)


def test_float8_rounds_by_chance_with_the_right_mean():
    x = normal(0, (64,))
    keys = jax.random.split(jax.random.key(1), 4000)
    many = jax.vmap(lambda key: baselines.dequantize(baselines.quantize(x, 64, key), x.shape))(keys)
    large = np.abs(x) > 0.1  # the smallest are kept from 0
    np.testing.assert_allclose(many.mean(0)[large], x[large], rtol=5e-3)


def test_float8_adam_is_near_adam_in_a_quarter_of_the_bytes():
    params = {"w": normal(0, (32, 64)), "b": normal(1, (64,))}
    exact, rounded = relaxed(optax.scale_by_adam()), relaxed(baselines.scale_by_adam_fp8())
    states = [tx.init(params) for tx in (exact, rounded)]
    steps = [jax.jit(tx.update) for tx in (exact, rounded)]
    for number in range(30):
        # A mean, so that the second moment is known well, and changes slowly.
        grads = {k: x + 0.3 * normal(number + 2, x.shape) for k, x in params.items()}
        (one, states[0]), (two, states[1]) = (
            step(grads, state) for step, state in zip(steps, states, strict=True)
        )
    a, b = (np.asarray(x["w"]).ravel() for x in (one, two))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
    assert np.abs(b).max() < 2  # no second moment rounded to 0
    size = [sum(x.nbytes for x in jax.tree.leaves(state)) for state in states]
    assert size[1] < 0.27 * size[0]


@pytest.mark.parametrize("error_feedback", [False, True])
def test_top_k(error_feedback):
    tx = baselines.sparsify_top_k(0.1, error_feedback)
    params = {"w": jnp.zeros((10, 20))}
    state = tx.init(params)
    total, kept = np.zeros((10, 20)), np.zeros((10, 20))
    for number in range(5):
        grads = {"w": normal(number, (10, 20))}
        sparse, state = tx.update(grads, state)
        assert np.count_nonzero(sparse["w"]) == 20
        total, kept = total + np.asarray(grads["w"]), kept + np.asarray(sparse["w"])
        if not error_feedback:
            left_out = np.abs(grads["w"])[np.asarray(sparse["w"]) == 0]
            assert left_out.max() <= np.abs(sparse["w"])[np.asarray(sparse["w"]) != 0].min()
    if error_feedback:  # nothing is lost, only late
        np.testing.assert_allclose(kept + np.asarray(state.residual["w"]), total, atol=1e-5)
    else:
        assert state.residual is None
