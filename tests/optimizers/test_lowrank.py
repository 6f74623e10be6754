"""The sketched residual, and training with it, on full and on compact gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import avals, basis_matrices
from tests.helpers.data import normal, regression, scanned, scanned_loss, sequence
from tests.helpers.loops import relaxed, run, train
from tests.helpers.reference import factors

ADAM = relaxed(optax.scale_by_adam())


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


@pytest.mark.parametrize("method", ["subspace", "random"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compact_gradients_give_the_same_training(method, dtype):
    params, targets, x = scanned(dtype)
    inner = relaxed(optax.adamw(0.02, weight_decay=0.1, eps=1e-3))
    tracking = lro.refresh_basis(every=3, targets=targets, method=method)
    tx = lro.galore_project(inner, tracking, lift=lro.sketched_residual_lift(2, 2.0))
    compact = lro.compact_value_and_grad(scanned_loss)

    @jax.jit
    def both(params, state):
        _, full = jax.value_and_grad(scanned_loss)(params, x)
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
    assert scanned_loss(params, x) < 0.8 * scanned_loss(start, x)


def test_micro_batches_share_the_directions():
    params, targets, x = scanned()
    tx = lro.galore_project(
        ADAM,
        lro.refresh_basis(targets=targets, method="random"),
        lift=lro.sketched_residual_lift(0.5),
    )
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(scanned_loss)
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
    _, full = jax.value_and_grad(scanned_loss)(params, x)
    expected, _ = tx.update(full, state, params)
    _, grads, bases = lro.compact_value_and_grad(scanned_loss)(params, x, opt_state=state)
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


def test_two_sided_targets_are_refused_by_the_sketch():
    with pytest.raises(ValueError, match="'w': sketched_residual_lift"):
        sketched("both", 2).init({"w": normal(0, (6, 10))})


def test_extra_directions_of_ones_own_are_refused():
    params, targets, x = scanned()
    tx = lro.galore_project(
        basis=lro.refresh_basis(targets=targets), lift=lro.sketched_residual_lift()
    )
    with pytest.raises(ValueError, match="'tall' has a lift that draws its own"):
        lro.compact_value_and_grad(scanned_loss)(
            params, x, opt_state=tx.init(params), extra={"tall": jnp.ones((7, 1))}
        )


def test_a_gradient_without_the_directions_is_refused():
    params, targets, x = scanned()
    tracking = lro.refresh_basis(targets=targets)
    plain = lro.galore_project(ADAM, tracking)
    _, grads, bases = lro.compact_value_and_grad(scanned_loss)(
        params, x, opt_state=plain.init(params)
    )
    tx = lro.galore_project(ADAM, tracking, lift=lro.sketched_residual_lift())
    with pytest.raises(ValueError, match="'stack': the lift reads"):
        tx.update(grads, tx.init(params), params, bases=bases)
