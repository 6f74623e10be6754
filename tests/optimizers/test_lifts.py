"""Lifts beyond the subspace: Fira's, APOLLO's and the sketched residual, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import as_matrix, avals, basis_matrices, lift, project
from tests.helpers.data import LAYOUTS, layout, normal, regression, sequence
from tests.helpers.loops import relaxed, run, train

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


class Adam:
    """Adam in float64, with the moments of one target."""

    def __init__(self):
        self.m = self.v = self.t = 0

    def __call__(self, core):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * core
        self.v = 0.999 * self.v + 0.001 * core**2
        first, second = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return first / (np.sqrt(second) + 1e-8)


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


def factors(update, core, p, q, per):
    """‖u‖/‖C‖ for each channel, or for each matrix."""
    if per == "channel" and q is None:
        axis = (1,)
    elif per == "channel" and p is None:
        axis = (2,)
    else:
        axis = (1, 2)
    lengths = [np.sqrt(np.sum(x**2, axis=axis, keepdims=True)) for x in (update, core)]
    return lengths[0] / lengths[1]


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


# Sketched residual -----------------------------------------------------------------------


def sketched(side, extra, amplitude=1.0, inner=None, rank=2, **options):
    inner = ADAM if inner is None else inner
    chosen = lro.sketched_residual_lift(extra, amplitude, **options)
    targets = [("w", lro.Target(rank, side=side))]
    return lro.galore_project(inner, lro.refresh_basis(targets=targets, every=2), lift=chosen)


@pytest.mark.parametrize("side", ["reduction", "output"])
def test_all_directions_give_the_whole_residual(side):
    params = {"w": normal(0, (6, 10)), "bias": normal(1, (4,))}
    gradients = sequence(params, 3)
    # More than the basis leaves free: all of them.
    one = sketched(side, extra=20)
    targets = [("w", lro.Target(2, side=side))]
    other = lro.galore_project(
        ADAM,
        lro.refresh_basis(targets=targets, every=2),
        lift=lro.fira_lift(limit=None),
    )
    left, states, _ = run(one, params, gradients, apply=False)
    right, _, _ = run(other, params, gradients, apply=False)
    np.testing.assert_allclose(left["w"], right["w"], rtol=1e-3, atol=1e-4)
    # Nothing is stored for it.
    assert jax.tree.leaves(states.lift_state) == []


@pytest.mark.parametrize("side", ["reduction", "output"])
def test_directions_are_orthonormal_new_and_outside_the_basis(side):
    seen = []

    def update(targets, state):
        seen.extend(targets)
        return [t.view.lift(t.update, t.bases) for t in targets], state

    looking = lro.sketched_residual_lift(3)._replace(update=update)
    params = {"w": normal(0, (2, 5, 11)), "v": normal(1, (2, 5, 11))}
    targets = {name: lro.Target(2, 1, 2, side=side) for name in params}
    tx = lro.galore_project(basis=lro.refresh_basis(targets=targets), lift=looking)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    # Their number is limited to what the basis leaves free.
    free = {"reduction": 3, "output": 3}[side]
    drawn = []
    for t in seen:
        p, q = (np.asarray(getattr(b, side), np.float64) for b in (t.bases, t.directions))
        assert q.shape == (2, p.shape[1], free)
        both = np.concatenate([p, q], -1)
        np.testing.assert_allclose(
            np.swapaxes(both, 1, 2) @ both, np.broadcast_to(np.eye(5), (2, 5, 5)), atol=1e-5
        )
        np.testing.assert_allclose(t.extra, t.view.project(t.gradient, t.directions), atol=1e-5)
        drawn.append(q @ np.swapaxes(q, 1, 2))
    if side == "output":  # Elsewhere they span all that is free.
        for i in range(len(drawn)):
            for j in range(i):
                assert not np.allclose(drawn[i], drawn[j], atol=0.1)


def test_the_mean_over_draws_is_the_residual():
    params = {"w": normal(0, (6, 10))}
    gradient = {"w": normal(1, (6, 10))}
    extra, rank, amplitude = 2, 2, 1.5
    tx = sketched("reduction", extra, amplitude)
    state = tx.init(params)
    _, state = tx.update(gradient, state, params)

    @jax.jit
    def at_count(count):
        tracking = state.tracker_state._replace(tracker_count=count, next_refresh=jnp.array([9999]))
        return tx.update(gradient, state._replace(tracker_state=tracking), params)[0]["w"]

    draws = np.asarray(jax.lax.map(at_count, jnp.arange(1, 2001)), np.float64)
    # The gradient has not changed, and neither has its direction in Adam's eyes.
    matrix = np.asarray(gradient["w"], np.float64)
    p, _ = basis_matrices(state.tracker_state)
    core = p[0].T @ matrix
    update = np.sign(core)
    residual = matrix - p[0] @ core
    scaled = factors(update[None], core[None], p, None, "channel")[0] * residual
    expected = p[0] @ update + amplitude * extra / (6 - rank) * scaled
    error = draws.mean(0) - expected
    noise = draws.std(0) / np.sqrt(len(draws))
    assert np.all(noise > 0)
    assert np.max(np.abs(error) / noise) < 5


def loss_fn(params, x):
    """Stacked layers under scan and remat, and one tall matrix, in the dtype of the params."""

    def layer(h, w):
        return h + jnp.tanh(jnp.matmul(h, w)), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(params["tall"].dtype), params["stack"])
    return jnp.mean(jnp.square(jnp.matmul(h, params["tall"]) - 0.5).astype(jnp.float32))


def scanned(dtype=jnp.float32):
    params = {"stack": 0.3 * normal(0, (3, 12, 12), dtype), "tall": 0.3 * normal(1, (12, 7), dtype)}
    targets = {"stack": lro.Target(3, 1, 2), "tall": lro.Target(2, 0, 1)}
    return params, targets, normal(2, (16, 12))


@pytest.mark.parametrize("method", ["subspace", "random"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compact_gradients_give_the_same_training(method, dtype):
    params, targets, x = scanned(dtype)
    inner = relaxed(optax.adamw(0.02, weight_decay=0.1, eps=1e-3))
    tracking = lro.refresh_basis(every=3, targets=targets, method=method)
    tx = lro.galore_project(inner, tracking, lift=lro.sketched_residual_lift(2, 2.0))
    compact = lro.compact_value_and_grad(loss_fn)

    @jax.jit
    def both(params, state):
        _, full = jax.value_and_grad(loss_fn)(params, x)
        expected, expected_state = tx.update(full, state, params)
        _, grads, bases = compact(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return (updates, expected), (state, expected_state), grads

    state, start = tx.init(params), params
    for _ in range(5):
        (updates, expected), (state, other), grads = both(params, state)
        assert grads["stack"].extra.shape == (3, 2, 12)
        assert grads["tall"].extra.shape == (12, 2)
        # A gradient that was rounded to bfloat16 on the full path only.
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        for path in params:
            np.testing.assert_allclose(
                np.asarray(updates[path], np.float32),
                np.asarray(expected[path], np.float32),
                atol=tolerance,
                err_msg=path,
            )
        assert avals(state) == avals(other)
        params = optax.apply_updates(params, updates)
    assert loss_fn(params, x) < 0.8 * loss_fn(start, x)


def test_micro_batches_share_the_directions():
    params, targets, x = scanned()
    tx = lro.galore_project(
        ADAM,
        lro.refresh_basis(targets=targets, method="random"),
        lift=lro.sketched_residual_lift(0.5),
    )
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(loss_fn)
    _, first, bases = grad_fn(params, x[:8], opt_state=state)
    _, second, again = grad_fn(params, x[8:], opt_state=state, bases=bases)
    np.testing.assert_array_equal(
        again.directions["stack"].reduction, bases.directions["stack"].reduction
    )
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    _, whole, _ = grad_fn(params, x, opt_state=state)
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_two_optimizers_draw_for_themselves():
    params, targets, x = scanned()
    parts = {
        name: lro.galore_project(
            ADAM,
            lro.refresh_basis(targets=[(name, target)], method="random"),
            lift=lro.sketched_residual_lift(extra),
        )
        for (name, target), extra in zip(targets.items(), (1, 3), strict=True)
    }
    tx = optax.partition(parts, {"stack": "stack", "tall": "tall"})
    state = tx.init(params)
    _, full = jax.value_and_grad(loss_fn)(params, x)
    expected, _ = tx.update(full, state, params)
    _, grads, bases = lro.compact_value_and_grad(loss_fn)(params, x, opt_state=state)
    assert (grads["stack"].extra.shape, grads["tall"].extra.shape) == ((3, 1, 12), (12, 3))
    updates, _ = tx.update(grads, state, params, bases=bases)
    for path in params:
        np.testing.assert_allclose(updates[path], expected[path], atol=1e-4)


def test_trains_a_regression_in_a_scan():
    params, gradient_fn = regression()
    tx = lro.galore_project(
        relaxed(optax.adam(0.03)),
        lro.refresh_basis(1, 10, method="random", targets=[("hidden/kernel", 2)]),
        lift=lro.sketched_residual_lift(),
    )
    losses, _, state = train(tx, params, gradient_fn, 80)
    assert losses[-1] < 0.5 * losses[0]
    assert avals(state) == avals(tx.init(params))


# Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [lro.fira_lift(), lro.apollo_lift()])
def test_compact_gradients_are_refused_by_name(chosen):
    params, targets, x = scanned()
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(targets=targets), lift=chosen)
    state = tx.init(params)
    _, grads, bases = lro.compact_value_and_grad(loss_fn)(params, x, opt_state=state)
    with pytest.raises(ValueError, match=f"stack.*{chosen.name} needs the full gradient"):
        tx.update(grads, state, params, bases=bases)


def test_two_sided_targets_are_refused_by_the_sketch():
    with pytest.raises(ValueError, match="'w': sketched_residual_lift"):
        sketched("both", 2).init({"w": normal(0, (6, 10))})


def test_extra_directions_of_ones_own_are_refused():
    params, targets, x = scanned()
    tx = lro.galore_project(
        basis=lro.refresh_basis(targets=targets), lift=lro.sketched_residual_lift()
    )
    with pytest.raises(ValueError, match="'tall' has a lift that draws its own"):
        lro.compact_value_and_grad(loss_fn)(
            params, x, opt_state=tx.init(params), extra={"tall": jnp.ones((7, 1))}
        )


def test_a_gradient_without_the_directions_is_refused():
    params, targets, x = scanned()
    tracking = lro.refresh_basis(targets=targets)
    plain = lro.galore_project(ADAM, tracking)
    _, grads, bases = lro.compact_value_and_grad(loss_fn)(params, x, opt_state=plain.init(params))
    tx = lro.galore_project(ADAM, tracking, lift=lro.sketched_residual_lift())
    with pytest.raises(ValueError, match="'stack': the lift reads"):
        tx.update(grads, tx.init(params), params, bases=bases)


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
