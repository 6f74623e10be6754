import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._arrays import rounding
from lowrank_optax._arrays.jaxpr import dependencies
from tests.helpers.assertions import avals
from tests.helpers.data import normal, random_like, sequence
from tests.helpers.loops import relaxed

INT8, UINT8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)


def spread(seed, shape):
    """Values over many octaves, some zero."""
    x = normal(seed, shape) * jnp.exp2(4 * normal(seed + 1, shape))
    return x.at[..., 0].set(0)


@pytest.mark.parametrize(("dtype", "error"), [(INT8, 0.2), (UINT8, 0.1)])
def test_codes_are_close_and_encode_as_themselves(dtype, error):
    x = spread(0, (4, 500))
    x = jnp.abs(x) if dtype == UINT8 else x
    codes, scale = rounding.to_codes(x, dtype, jax.random.key(0))
    assert (codes.dtype, codes.shape, scale.shape) == (dtype, x.shape, (4, 1))
    back = rounding.from_codes(codes, scale)
    kept = np.abs(x) > np.max(np.abs(x), -1, keepdims=True) * 2.0**-30
    np.testing.assert_allclose(np.asarray(back)[kept], np.asarray(x)[kept], rtol=error)
    np.testing.assert_array_equal(back[:, 0], 0)
    again, same = rounding.to_codes(back, dtype, jax.random.key(1))
    assert np.mean(np.asarray(again) != np.asarray(codes)) < 0.01
    np.testing.assert_array_equal(same, scale)


@pytest.mark.parametrize("kind", ["int8", "uint8", "bfloat16"])
def test_rounding_is_right_on_average(kind):
    x = jnp.abs(spread(2, (1, 64)))

    def once(key):
        if kind == "bfloat16":
            return rounding.to_bfloat16(x, key).astype(jnp.float32)
        return rounding.from_codes(*rounding.to_codes(x, jnp.dtype(kind), key))

    draws = np.asarray(jax.vmap(once)(jax.random.split(jax.random.key(0), 4000)), np.float64)
    noise = draws.std(0) / np.sqrt(len(draws))
    assert np.any(noise > 0)
    assert np.max(np.abs(draws.mean(0) - x) - 5 * noise - 1e-6 * np.asarray(x)) <= 0


def test_what_is_not_finite_stays_so():
    x = normal(0, (3, 64)).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf)
    back = rounding.from_codes(*rounding.to_codes(x, INT8, jax.random.key(0)))
    assert not np.any(np.isfinite(back[:2]))
    assert np.all(np.isfinite(back[2]))
    half = rounding.to_bfloat16(x, jax.random.key(0))
    assert np.isnan(half[0, 3])
    assert np.isinf(half[1, 5])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16])
def test_a_slow_average_keeps_moving(dtype):
    params = {"w": jnp.zeros((4, 64))}
    tx = lro.quantized_moments(relaxed(optax.scale_by_rms(0.999)), dtype, smallest=64)

    @jax.jit
    def after(gradient, state, steps):
        def step(state, _):
            return tx.update({"w": gradient}, state, params)[1], None

        return jax.lax.scan(step, state, length=1000)[0]

    state = after(jnp.ones((4, 64)), tx.init(params), 1000)
    raised = float(jnp.mean(optax.tree.get(state.opened(), "nu")["w"]))
    np.testing.assert_allclose(raised, 1 - 0.999**1000, rtol=0.05)
    state = after(jnp.zeros((4, 64)), state, 1000)
    fallen = float(jnp.mean(optax.tree.get(state.opened(), "nu")["w"]))
    np.testing.assert_allclose(fallen, raised * 0.999**1000, rtol=0.15)


@pytest.mark.parametrize("moments", ["rotate", "reset", "keep"])
def test_inside_a_subspace_optimizer(moments):
    params = {"w": 0.1 * normal(0, (16, 64)), "bias": jnp.zeros(8)}
    gradients = sequence(params, 6)
    tracker = lro.refresh_basis(8, 2)

    def updates_of(inner):
        tx = lro.galore_project(relaxed(inner), tracker, moments=moments)

        @jax.jit
        def run(state):
            def step(state, gradient):
                updates, state = tx.update(gradient, state, params)
                return state, updates["w"]

            return jax.lax.scan(step, state, gradients)

        state = tx.init(params)
        end, updates = run(state)
        assert avals(state) == avals(end)
        return end, np.asarray(updates)

    inner = optax.adamw(0.1, weight_decay=0.1)
    end, updates = updates_of(lro.quantized_moments(inner, smallest=64))
    _, expected = updates_of(inner)
    codes = optax.tree.get(end.inner_state.codes, "nu")
    assert (codes["w"].dtype, codes["bias"].dtype) == (jnp.uint8, jnp.float32)
    difference = np.linalg.norm(updates - expected, axis=(1, 2)) / np.linalg.norm(
        expected, axis=(1, 2)
    )
    assert np.all(difference < 0.15), difference
    assert difference[0] == 0 or difference[0] < 1e-5


def opened_after(inner):
    """For each leaf whether its new moments wait for those of the others."""
    tx = lro.quantized_moments(relaxed(inner), smallest=64)
    params = {name: jnp.ones((8, 16)) for name in "abc"}
    state = tx.init(params)

    def codes_of(first, gradients):
        codes = optax.tree.set(state.codes, mu=first)
        _, new = tx.update(gradients, state._replace(codes=codes), params)
        return optax.tree.get(new.codes, "mu")

    found = dependencies(jax.make_jaxpr(codes_of)(optax.tree.get(state.codes, "mu"), params))
    return [f"{bits & 0b111:03b}" for bits in found]


def test_moments_are_opened_one_leaf_at_a_time():
    # The second leaf is opened once the first is closed, and the third after both.
    assert opened_after(optax.adam(1e-3)) == ["001", "011", "111"]
    # What depends on gradients alone does not tie the leaves together, the norm of moments does.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    assert opened_after(clipped) == ["001", "011", "111"]


def test_moments_that_depend_on_all_others_are_right():
    params = {name: normal(i, (8, 16)) for i, name in enumerate("abc")}
    inner = relaxed(
        optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0), optax.trace(0.9))
    )
    tx = lro.quantized_moments(inner, jnp.bfloat16, smallest=64)
    state, expected = tx.init(params), inner.init(params)
    for step in range(3):
        gradients = random_like(params, step)
        updates, state = tx.update(gradients, state, params)
        wanted, expected = inner.update(gradients, expected, params)
        for name in params:
            np.testing.assert_allclose(updates[name], wanted[name], atol=2e-2)


def test_an_optimizer_without_a_state():
    params = {"w": jnp.ones((8, 16))}
    tx = lro.quantized_moments(optax.sgd(0.5))
    updates, state = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], -0.5)
    assert int(state.quantized_count) == 1


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.bfloat16])
def test_around_a_subspace_optimizer_it_leaves_bases_alone(dtype):
    params = {"w": normal(0, (32, 128))}
    tracker = lro.refresh_basis(8, 3, dtype=dtype)
    inside = lro.galore_project(relaxed(optax.adam(0.1)), tracker)
    tx = lro.quantized_moments(inside, smallest=64)
    state, expected = tx.init(params), inside.init(params)
    update = jax.jit(tx.update)
    for step in range(4):
        gradients = random_like(params, step)
        updates, after = update(gradients, state, params)
        assert avals(after) == avals(state)
        wanted, expected = jax.jit(inside.update)(gradients, expected, params)
        state = after
        difference = np.linalg.norm(updates["w"] - wanted["w"])
        assert difference < 0.2 * np.linalg.norm(wanted["w"])
    left = state.codes.tracker_state.reduction_basis["w"]
    right = expected.tracker_state.reduction_basis["w"]
    assert left.dtype == right.dtype
    assert float(jnp.mean(left == right)) > 0.95


def test_bytes():
    params = {"w": jnp.zeros((64, 256)), "bias": jnp.zeros(256)}
    whole = lro.describe(optax.adam(1e-3), params).state_bytes
    few = lro.describe(lro.quantized_moments(optax.adam(1e-3)), params).state_bytes
    assert few < 0.3 * whole


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="dtype='float32'"):
        lro.quantized_moments(optax.adam(1e-3), jnp.float32)
    with pytest.raises(ValueError, match="dtype='int9' is not one of 'int8', 'bfloat16'"):
        lro.quantized_moments(optax.adam(1e-3), "int9")
    with pytest.raises(ValueError, match="smallest=1"):
        lro.quantized_moments(optax.adam(1e-3), smallest=1)
