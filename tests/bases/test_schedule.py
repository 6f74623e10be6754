import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import avals, unchecked
from tests.helpers.data import normal
from tests.helpers.loops import relaxed, track

EVERY = lro.adaptive_every(2, 8, overlap=0.9)
TARGETS = {"still": lro.Target(2), "turning": lro.Target(2), "stack": lro.Target(2, 1, 2)}


def gradients(steps):
    """Gradients of rank 2: of one subspace, of another at each step, and half and half."""
    still = normal(0, (12, 2)) @ normal(1, (2, 16))
    turning = normal(2, (steps, 12, 2)) @ normal(3, (steps, 2, 16))
    both = jnp.stack([jnp.broadcast_to(still, turning.shape), turning], 1)
    return {"still": both[:, 0], "turning": turning, "stack": both}


PARAMS = {
    "still": jnp.zeros((12, 16)),
    "turning": jnp.zeros((12, 16)),
    "stack": jnp.zeros((2, 12, 16)),
}


def refreshed_at(states):
    counts = np.asarray(states.refreshes)
    return [np.flatnonzero(np.diff(counts[:, i])).tolist() for i in range(counts.shape[1])]


def test_the_interval_grows_while_the_subspace_stays():
    tracker = lro.refresh_basis(every=EVERY, targets=TARGETS, method="svd")
    states = track(tracker, PARAMS, gradients(40))
    names = [projection.path for projection in states.plan.projections]
    at = dict(zip(names, refreshed_at(states), strict=True))
    # 2 after the first, then 4 and 8, which is the limit.
    assert at["still"] == [0, 2, 6, 14, 22, 30, 38]
    # Back to the shortest, and never below it.
    assert at["turning"] == list(range(0, 40, 2))
    # Half of the matrices of a stack moved: an overlap of about a half is below 0.9.
    assert at["stack"] == list(range(0, 40, 2))


def test_the_sign_of_a_basis_does_not_matter():
    tracker = lro.refresh_basis(every=EVERY, targets={"w": lro.Target(2)}, method="svd")
    params = {"w": jnp.zeros((12, 16))}
    flips = jnp.where(jnp.arange(20) % 3 == 0, -1.0, 1.0)[:, None, None]
    states = track(tracker, params, {"w": flips * gradients(1)["still"]})
    assert refreshed_at(states) == [[0, 2, 6, 14]]


def test_a_subspace_that_stops_is_noticed_and_one_that_starts_too():
    steps = 60
    values = gradients(steps)
    mixed = jnp.where((jnp.arange(steps) < 20)[:, None, None], values["still"], values["turning"])
    tracker = lro.refresh_basis(every=EVERY, targets={"w": lro.Target(2)}, method="svd")
    states = track(tracker, {"w": jnp.zeros((12, 16))}, {"w": mixed})
    # It takes one refresh a halving to come back down.
    assert refreshed_at(states)[0] == [0, 2, 6, 14, 22, 26, *range(28, 60, 2)]


def test_compact_gradients_follow_the_same_schedule():
    params = {"w": normal(0, (12, 16))}
    x = normal(1, (32, 12)) * jnp.asarray([5.0, 4.0, *[0.01] * 10])

    def loss(params):
        return jnp.mean(jnp.tanh(x @ params["w"]))

    tracker = lro.refresh_basis(every=EVERY, targets={"w": lro.Target(2)})
    tx = lro.galore_project(relaxed(optax.adam(1e-3)), tracker)
    compact = lro.compact_value_and_grad(loss)

    @jax.jit
    def steps(params):
        def one(state, _):
            _, grads, bases = compact(params, opt_state=state)
            return tx.update(grads, state, params, bases=bases)[1], state.tracker_state.refreshes

        def full(state, _):
            grads = jax.grad(loss)(params)
            return tx.update(grads, state, params)[1], state.tracker_state.refreshes

        start = tx.init(params)
        return [jax.lax.scan(step, start, length=16)[1] for step in (one, full)]

    left, right = steps(params)
    np.testing.assert_array_equal(left, right)
    assert np.flatnonzero(np.diff(left[:, 0])).tolist() == [0, 2, 6, 14]


def test_stagger_spreads_the_first_interval():
    params = {name: normal(i, (6, 10)) for i, name in enumerate("ac")}
    tracker = lro.refresh_basis(2, lro.adaptive_every(4, 8), stagger=True)
    state = tracker.init(params)
    assert avals(state) == avals(tracker.update(params, state)[1])
    assert tracker.update(params, state)[1].next_refresh.tolist() == [4, 6]


def test_a_fixed_interval_stores_none():
    params = {"w": jnp.zeros((6, 10))}
    assert lro.refresh_basis(2, 5).init(params).intervals is None
    assert lro.refresh_basis(2, EVERY).init(params).intervals.tolist() == [2]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"initial": 0}, "initial=0"),
        ({"initial": 9, "limit": 8}, "limit=8"),
        ({"growth": 1.0}, "growth=1.0"),
        ({"overlap": 1.5}, "overlap=1.5"),
    ],
)
def test_errors_name_the_argument(arguments, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        lro.adaptive_every(**arguments)
    with pytest.raises(TypeError, match="initial must be an int"):
        unchecked(lro.adaptive_every)(1.5)
