"""Lifts beyond the subspace: Fira's and APOLLO's, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import as_matrix, basis_matrices, lift, project
from tests.helpers.data import LAYOUTS, layout, normal, scanned, scanned_loss, sequence
from tests.helpers.loops import relaxed, run
from tests.helpers.reference import Adam, factors

STEPS = 5
RATES = (0.1, 0.0, 0.3, 0.2, 0.02)


def schedule(count):
    """Rates that jump and vanish, which a limiter must not take for growth."""
    return jnp.asarray(RATES)[count]


def gradients_of(params):
    """Gradients whose size jumps up and down, so that a limiter has something to do."""
    sizes = jnp.asarray([1.0, 3.0, 0.5, 1e-3, 2.0])
    return jax.tree.map(
        lambda g: g * sizes.reshape(-1, *[1] * (g.ndim - 1)), sequence(params, STEPS)
    )


ADAM = relaxed(optax.scale_by_adam())
# One layout of each kind, to compile less: rows and columns of several axes, batch axes.
LAYOUTS = {name: LAYOUTS[name] for name in ("tall", "query", "heads_first", "stack", "experts")}


def tracker(side):
    targets = {name: layout(name, side)[1] for name in LAYOUTS}
    return lro.refresh_basis(every=2, targets=targets, method="random")


PARAMS = {name: normal(i, LAYOUTS[name][0]) for i, name in enumerate(LAYOUTS)}


class Limiter:
    """The norm-growth limiter, for each matrix of a batch."""

    def __init__(self, limit):
        self.limit, self.last = limit, None

    def __call__(self, phi):
        norms = np.sqrt(np.sum(phi**2, axis=(1, 2), keepdims=True))
        if self.last is not None:
            phi = phi * np.minimum(1, self.limit * self.last / norms)
            norms = np.minimum(norms, self.limit * self.last)
        self.last = norms
        return phi


def expected_updates(name, target, states, gradients, full_update):
    """Every step's update in float64 with the bases that the states have."""
    adam, limiter = Adam(), Limiter(1.01)
    for step, rate in enumerate(RATES):
        gradient, back = as_matrix(gradients[name][step], target, LAYOUTS[name][0])
        now = jax.tree.map(lambda x, step=step: x[step + 1], states.tracker_state)
        p, q = basis_matrices(now, name)
        core = project(gradient, p, q)
        if rate == 0:
            adam(core)  # A step that is not made is not one to compare with.
            yield 0 * back(gradient)
            continue
        yield -rate * 0.5 * back(full_update(gradient, core, adam(core), p, q, limiter))


def fira(gradient, core, update, p, q, limiter):
    residual = gradient - lift(core, p, q)
    return lift(update, p, q) + limiter(factors(update, core, p, q, "channel") * residual)


def apollo(gradient, core, update, p, q, limiter, per):
    return limiter(factors(update, core, p, q, per) * gradient)


@pytest.mark.parametrize(
    ("chosen", "full_update"),
    [
        (lro.fira_lift(), fira),
        (lro.apollo_lift(), functools.partial(apollo, per="channel")),
        (lro.apollo_lift("tensor"), functools.partial(apollo, per="tensor")),
    ],
    ids=["fira", "apollo", "apollo_mini"],
)
@pytest.mark.parametrize("side", ["smaller", "larger", "both"])
def test_lift_against_its_formula(side, chosen, full_update):
    # Every layout, with batch axes; a rate inside the inner optimizer that jumps and vanishes.
    inner = relaxed(optax.adam(schedule))
    tx = lro.galore_project(inner, tracker(side), scale=0.5, lift=chosen, moments="keep")
    gradients = gradients_of(PARAMS)
    updates, states, _ = run(tx, PARAMS, gradients, apply=False)
    for name in LAYOUTS:
        target = layout(name, side)[1]
        expected = expected_updates(name, target, states, gradients, full_update)
        for step, update in enumerate(expected):
            np.testing.assert_allclose(
                updates[name][step], update, rtol=2e-3, atol=2e-5, err_msg=f"{name} {step}"
            )


def test_the_limiter_is_at_work_in_these_tests():
    tx = [
        lro.galore_project(ADAM, tracker("smaller"), lift=lro.fira_lift(limit))
        for limit in (1.01, None)
    ]
    limited, free = (run(t, PARAMS, gradients_of(PARAMS), apply=False)[0] for t in tx)
    np.testing.assert_allclose(limited["stack"][0], free["stack"][0], rtol=1e-5)
    assert not np.allclose(limited["stack"][2:], free["stack"][2:], rtol=1e-2)


@pytest.mark.parametrize("name", ["fira_lift", "apollo_lift"])
def test_a_learning_rate_may_stand_inside_or_behind(name):
    # With weight decay, a steep warm-up, and the sign of either place.
    rate = optax.linear_schedule(0.02, 0.2, 3)
    inside = optax.adamw(rate, weight_decay=0.3)
    chosen = getattr(lro, name)()
    one = lro.galore_project(relaxed(inside), tracker("smaller"), lift=chosen)
    other = optax.chain(
        lro.galore_project(ADAM, tracker("smaller"), lift=chosen),
        optax.add_decayed_weights(0.3),
        relaxed(optax.scale_by_learning_rate(rate)),
    )
    left, _, _ = run(one, PARAMS, gradients_of(PARAMS))
    right, _, _ = run(other, PARAMS, gradients_of(PARAMS))
    for path in PARAMS:
        np.testing.assert_allclose(left[path], right[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "chosen", [lro.fira_lift(), lro.apollo_lift(), lro.sketched_residual_lift()]
)
def test_extreme_gradients_stay_finite(chosen):
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(ADAM, lro.refresh_basis(2), lift=chosen)
    sizes = jnp.asarray([0.0, 1e-30, 1e25, 0.0, 1e-20])[:, None, None]
    gradients = {"w": sizes * sequence(params, 5)["w"]}
    updates, states, _ = run(tx, params, gradients, apply=False)
    assert np.all(np.isfinite(updates["w"]))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states.lift_state))


def test_a_nan_does_not_stay_in_the_limiter():
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2), lift=lro.fira_lift())
    gradients = sequence(params, 3)["w"].at[1].set(jnp.nan)
    updates, states, _ = run(tx, params, {"w": gradients}, apply=False)
    assert np.all(np.isfinite(updates["w"][2]))
    norms = states.lift_state.limited_norm
    np.testing.assert_array_equal(norms[2], norms[1])


# Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [lro.fira_lift(), lro.apollo_lift()])
def test_compact_gradients_are_refused_by_name(chosen):
    params, targets, x = scanned()
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(targets=targets), lift=chosen)
    state = tx.init(params)
    _, grads, bases = lro.compact_value_and_grad(scanned_loss)(params, x, opt_state=state)
    with pytest.raises(ValueError, match=f"stack.*{chosen.name} needs the full gradient"):
        tx.update(grads, state, params, bases=bases)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: lro.fira_lift(0.5), ValueError, "limit=0.5"),
        (lambda: lro.apollo_lift(limit=0.0), ValueError, "limit=0.0"),
        (lambda: lro.apollo_lift("row"), ValueError, "per='row'"),
        (lambda: lro.sketched_residual_lift(0), ValueError, "extra=0"),
        (lambda: lro.sketched_residual_lift(float("nan")), ValueError, "extra=nan"),
    ],
)
def test_constructor_errors_name_the_argument(make, error, match):
    with pytest.raises(error, match=match):
        make()
