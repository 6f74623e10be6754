"""Bases in few bits."""

import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import lowrank_optax as lro
from lowrank_optax._bases import storage
from lowrank_optax._plan.view import Bases, make_view
from tests.helpers.assertions import avals
from tests.helpers.data import normal, regression
from tests.helpers.loops import relaxed, train

VIEW = make_view((3, 40, 60), 1, 2)


def basis():
    return jnp.stack([jnp.linalg.qr(normal(i, (40, 6)))[0] for i in range(3)])


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(jnp.float32, 1e-7), (jnp.bfloat16, 4e-3), (jnp.int8, 1.5e-2), (storage.PACKED, 0.13)],
)
def test_a_basis_survives_storage(dtype, error):
    stored = storage.store(basis(), VIEW, jnp.dtype(dtype))
    assert stored.dtype == dtype
    assert storage.shape_of(stored) == basis().shape
    assert stored.nbytes == basis().nbytes // 4 * jnp.dtype(dtype).itemsize // (
        2 if dtype == storage.PACKED else 1
    )
    back = storage.read(stored, VIEW).astype(jnp.float32)
    assert float(jnp.max(jnp.linalg.norm(back - basis(), axis=1))) < error
    # Storing what was read changes nothing any more.
    again = storage.store(storage.read(stored, VIEW), VIEW, jnp.dtype(dtype))
    np.testing.assert_array_equal(again, stored)
    if not jnp.issubdtype(dtype, jnp.floating):
        np.testing.assert_allclose(jnp.linalg.norm(back, axis=1), 1.0, rtol=1e-5)


@given(
    hypothesis.extra.numpy.arrays(
        np.int8,
        st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda half: 2 * half)),
        elements=st.integers(-8, 7),
    )
)
def test_what_is_packed_comes_back(codes):
    packed = storage._pack(jnp.asarray(codes))
    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(storage._unpack(packed), codes)


def test_4_bits_keep_directions_of_any_distribution():
    rows = 1024
    normals = normal(0, (rows,))
    columns = {
        "normal": normals,
        "one entry": jnp.zeros(rows).at[7].set(1.0),
        "an outlier": normals.at[3].set(30.0),
        "two sizes": jnp.where(jnp.arange(rows) % 2 == 0, 1.0, 0.01),
    }
    matrix = jnp.stack([x / jnp.linalg.norm(x) for x in columns.values()], axis=-1)
    view = make_view((rows, rows), 0, 1)
    back = storage.read(storage.store(matrix, view, storage.PACKED), view)
    cosines = dict(zip(columns, jnp.sum(back * matrix, axis=0).tolist(), strict=True))
    assert cosines["normal"] > 0.991
    assert cosines["one entry"] > 0.9999
    assert cosines["two sizes"] > 0.999
    # Uncut, the entries beside the outlier would all round to zero: a cosine of 0.68.
    assert cosines["an outlier"] > 0.8


def test_both_sides_keep_their_places():
    pair = Bases(None, basis())
    stored = storage.store_all(pair, VIEW, Bases(None, basis().astype(jnp.int8)))
    assert stored.reduction is None
    assert stored.output.dtype == jnp.int8
    assert storage.read_all(stored, VIEW).output.dtype == jnp.float32


@pytest.mark.parametrize(
    ("few_bits", "stored", "lost"), [(jnp.int8, jnp.int8, 2e-3), (jnp.int4, jnp.uint8, 3e-2)]
)
def test_training_with_bases_in_few_bits(few_bits, stored, lost):
    params, gradient_fn = regression()
    targets = [("hidden/kernel", 4)]
    losses, states = {}, {}
    for dtype in (jnp.float32, few_bits):
        tracker = lro.refresh_basis(every=10, targets=targets, dtype=dtype)
        tx = lro.galore_project(relaxed(optax.adam(0.05)), tracker, metrics=True)
        losses[dtype], _, states[dtype] = train(tx, params, gradient_fn, 60)
        assert avals(states[dtype]) == avals(tx.init(params))
    state = states[few_bits]
    assert state.tracker_state.reduction_basis["hidden"]["kernel"].dtype == stored
    assert losses[few_bits][-1] < 1.1 * losses[jnp.float32][-1] + 1e-4
    # Of the same gradient at the same step, as much is kept.
    energies = []
    for dtype in (jnp.float32, few_bits):
        tracker = lro.refresh_basis(targets=targets, dtype=dtype)
        watching = lro.galore_project(basis=tracker, metrics=True)
        _, watched = jax.jit(watching.update)(gradient_fn(params)[1], watching.init(params))
        energies.append(float(lro.metrics(watched).worst.energy))
    np.testing.assert_allclose(*energies, atol=lost)
    described = lro.describe(tx, params)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tx.init(params)))
    assert described.state_bytes == whole


@pytest.mark.parametrize("method", ["subspace", "random"])
@pytest.mark.parametrize(("dtype", "stored"), [(jnp.int8, jnp.int8), (jnp.int4, jnp.uint8)])
def test_compact_gradients_with_bases_in_few_bits(method, dtype, stored):
    params = {"w": 0.1 * normal(0, (12, 16))}
    x = normal(1, (32, 12))

    def loss(params):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) - 0.3))

    tracker = lro.refresh_basis(every=2, targets={"w": lro.Target(4)}, dtype=dtype, method=method)
    tx = lro.galore_project(
        relaxed(optax.adam(0.02, eps=1e-3)), tracker, lift=lro.sketched_residual_lift(2)
    )
    compact = lro.compact_value_and_grad(loss)

    @jax.jit
    def both(state):
        expected, other = tx.update(jax.grad(loss)(params), state, params)
        _, grads, bases = compact(params, opt_state=state)
        assert bases.bases["w"].reduction.dtype == stored
        updates, state = tx.update(grads, state, params, bases=bases)
        return updates["w"], expected["w"], state, other

    state = tx.init(params)
    for _ in range(4):
        updates, expected, state, other = both(state)
        # A code may round up on one path and down on the other.
        left, right = (s.tracker_state.encoders()[0].reduction for s in (state, other))
        step = np.max(np.abs(left)) / (127 if dtype == jnp.int8 else 7)
        assert np.max(np.abs(left - right)) <= 1.1 * step
        same = np.array_equal(left, right)
        np.testing.assert_allclose(updates, expected, atol=1e-5 if same else 3e-3)


def test_what_cannot_hold_a_basis_is_refused():
    with pytest.raises(ValueError, match="dtype=int32 cannot hold a basis"):
        lro.refresh_basis(2, dtype=jnp.int32)
    with pytest.raises(TypeError, match="refresh_basis: dtype='int3' is no dtype; use a float"):
        lro.refresh_basis(2, dtype="int3")
    odd = lro.refresh_basis(3, dtype=jnp.int4)
    with pytest.raises(ValueError, match=r"'kernel': rank 3 is odd.*use an even rank, 4 say"):
        odd.init({"kernel": jnp.ones((8, 16))})


def test_stored_bases_are_opened_once_a_step_and_the_old_ones_only_at_a_refresh():
    """With `rotate` the old int8 bases were decoded at every step, for nothing but a refresh."""
    params = {"w": normal(0, (64, 96))}
    tx = lro.galore_project(
        optax.scale(1.0), lro.refresh_basis(4, 10, dtype=jnp.int8, method="random")
    )

    def opened(jaxpr, inside=False):
        """How many conversions of int8 bases to floats are outside of every branch."""
        found = 0
        for eqn in jaxpr.eqns:
            kinds = {str(v.aval.dtype) for v in eqn.invars if hasattr(v.aval, "dtype")}
            found += eqn.primitive.name == "convert_element_type" and "int8" in kinds
            if eqn.primitive.name == "cond":
                continue
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                found += opened(inner) if hasattr(inner, "eqns") else 0
        return found

    state = tx.init(params)
    assert opened(jax.make_jaxpr(tx.update)(params, state, params).jaxpr) == 1
