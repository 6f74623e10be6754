"""Bases in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax import _storage
from lowrank_optax._view import Bases, make_view
from tests.helpers import avals, normal, regression, relaxed, train

VIEW = make_view((3, 40, 60), 1, 2)


def basis():
    return jnp.stack([jnp.linalg.qr(normal(i, (40, 5)))[0] for i in range(3)])


@pytest.mark.parametrize(
    ("dtype", "error"), [(jnp.float32, 1e-7), (jnp.bfloat16, 4e-3), (jnp.int8, 1.5e-2)]
)
def test_a_basis_survives_storage(dtype, error):
    stored = _storage.store(basis(), VIEW, jnp.dtype(dtype))
    assert stored.dtype == dtype
    back = _storage.read(stored, VIEW).astype(jnp.float32)
    assert float(jnp.max(jnp.linalg.norm(back - basis(), axis=1))) < error
    # Storing what was read changes nothing any more.
    again = _storage.store(_storage.read(stored, VIEW), VIEW, jnp.dtype(dtype))
    np.testing.assert_array_equal(again, stored)
    if dtype == jnp.int8:
        np.testing.assert_allclose(jnp.linalg.norm(back, axis=1), 1.0, rtol=1e-5)


def test_both_sides_keep_their_places():
    pair = Bases(None, basis())
    stored = _storage.store_all(pair, VIEW, Bases(None, basis().astype(jnp.int8)))
    assert stored.reduction is None
    assert stored.output.dtype == jnp.int8
    assert _storage.read_all(stored, VIEW).output.dtype == jnp.float32


def test_training_with_8_bit_bases():
    params, gradient_fn = regression()
    targets = [("hidden/kernel", 4)]
    losses, states = {}, {}
    for dtype in (jnp.float32, jnp.int8):
        tracker = lro.refresh_basis(every=10, targets=targets, dtype=dtype)
        tx = lro.galore_project(relaxed(optax.adam(0.05)), tracker, metrics=True)
        losses[dtype], _, states[dtype] = train(tx, params, gradient_fn, 60)
        assert avals(states[dtype]) == avals(tx.init(params))
    state = states[jnp.int8]
    assert state.tracker_state.reduction_basis["hidden"]["kernel"].dtype == jnp.int8
    assert losses[jnp.int8][-1] < 1.1 * losses[jnp.float32][-1] + 1e-4
    # Of the same gradient at the same step, as much is kept.
    energies = []
    for dtype in (jnp.float32, jnp.int8):
        tracker = lro.refresh_basis(targets=targets, dtype=dtype)
        watching = lro.galore_project(basis=tracker, metrics=True)
        _, watched = jax.jit(watching.update)(gradient_fn(params)[1], watching.init(params))
        energies.append(float(lro.metrics(watched).worst.energy))
    np.testing.assert_allclose(*energies, atol=2e-3)
    described = lro.describe(tx, params)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tx.init(params)))
    assert described.state_bytes == whole


@pytest.mark.parametrize("method", ["subspace", "random"])
def test_compact_gradients_with_8_bit_bases(method):
    params = {"w": 0.1 * normal(0, (12, 16))}
    x = normal(1, (32, 12))

    def loss(params):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) - 0.3))

    tracker = lro.refresh_basis(
        every=2, targets={"w": lro.Target(3)}, dtype=jnp.int8, method=method
    )
    tx = lro.galore_project(
        relaxed(optax.adam(0.02, eps=1e-3)), tracker, lift=lro.sketched_residual_lift(2)
    )
    compact = lro.compact_value_and_grad(loss)

    @jax.jit
    def both(state):
        expected, other = tx.update(jax.grad(loss)(params), state, params)
        _, grads, bases = compact(params, opt_state=state)
        assert bases.bases["w"].reduction.dtype == jnp.int8
        updates, state = tx.update(grads, state, params, bases=bases)
        return updates["w"], expected["w"], state, other

    state = tx.init(params)
    for _ in range(4):
        updates, expected, state, other = both(state)
        # A code may round up on one path and down on the other.
        left, right = (
            np.asarray(s.tracker_state.reduction_basis["w"], int) for s in (state, other)
        )
        assert np.max(np.abs(left - right)) <= 1
        same = np.array_equal(left, right)
        np.testing.assert_allclose(updates, expected, atol=1e-5 if same else 3e-3)


def test_what_cannot_hold_a_basis_is_refused():
    with pytest.raises(ValueError, match="dtype=int32 cannot hold a basis"):
        lro.refresh_basis(2, dtype=jnp.int32)
