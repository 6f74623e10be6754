import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import (
    as_matrix,
    assert_orthonormal,
    avals,
    basis_matrices,
    energy,
    swap,
    unchecked,
)
from tests.helpers.data import LAYOUTS, SIDES, at, layout, normal, random_like, sequence
from tests.helpers.loops import track

pytestmark = pytest.mark.newest

TWO = {"a": jnp.zeros((6, 10)), "bias": jnp.zeros(10), "w": jnp.zeros((10, 6))}
BOTH = (("^(a|w)$", 2),)
# One object for equal options, so that tests share what is compiled.
make = functools.cache(lro.refresh_basis)


def refresh_steps(states, target=0):
    """The steps at which a target's basis was replaced."""
    return list(np.flatnonzero(np.diff(states.refreshes[:, target])))


def changed_steps(states, tree, path):
    basis = getattr(states, tree)[path]
    return [t for t in range(len(basis) - 1) if not np.array_equal(basis[t], basis[t + 1])]


# When


def test_refreshes_at_multiples_of_every():
    states = track(make(every=3, targets=BOTH, method="subspace"), TWO, sequence(TWO, 8))
    assert refresh_steps(states) == [0, 3, 6]
    assert refresh_steps(states, 1) == [0, 3, 6]
    # The counters tell the truth about the arrays.
    assert changed_steps(states, "reduction_basis", "a") == [0, 3, 6]
    assert changed_steps(states, "output_basis", "w") == [0, 3, 6]
    np.testing.assert_array_equal(states.tracker_count, np.arange(9))


def test_a_refresh_uses_the_gradient_of_its_own_step():
    gradients = sequence(TWO, 8)
    states = track(make(every=3, targets=BOTH, method="gram"), TWO, gradients)
    for step in (0, 3, 6):
        for path in ("a", "w"):
            matrix = np.asarray(gradients[path][step], np.float64)
            p, q = basis_matrices(at(states, step + 1), path)
            values = np.linalg.svd(matrix)[1] ** 2
            best = values[:2].sum() / values.sum()
            assert energy(matrix[None], p, q) == pytest.approx(best, rel=1e-5)


def test_every_may_be_a_schedule():
    every = lambda t: jnp.where(t < 5, 2.0, 4.0)  # noqa: E731
    states = track(lro.refresh_basis(every=every, targets=BOTH), TWO, sequence(TWO, 13))
    assert refresh_steps(states) == [0, 2, 4, 6, 8, 12]


def test_a_schedule_below_one_refreshes_at_every_step():
    states = track(lro.refresh_basis(every=lambda t: t * 0, targets=BOTH), TWO, sequence(TWO, 3))
    assert refresh_steps(states) == [0, 1, 2]


def test_stagger_spreads_refreshes_over_the_interval():
    params = {name: jnp.zeros((6, 10)) for name in "acde"}
    tracker = lro.refresh_basis(2, 8, stagger=True, method="random")
    states = track(tracker, params, sequence(params, 20))
    assert refresh_steps(states, 0) == [0, 8, 16]
    assert refresh_steps(states, 1) == [0, 2, 10, 18]
    assert refresh_steps(states, 2) == [0, 4, 12]
    assert refresh_steps(states, 3) == [0, 6, 14]
    at_once = np.diff(states.refreshes, axis=0).sum(axis=1)
    assert at_once[0] == 4
    assert at_once[1:].max() == 1


def test_stagger_with_more_targets_than_steps_still_keeps_the_interval():
    params = {f"layer_{i}": jnp.zeros((6, 10)) for i in range(7)}
    tracker = lro.refresh_basis(2, 3, stagger=True, method="random")
    counts = np.diff(track(tracker, params, sequence(params, 12)).refreshes, axis=0)
    assert counts[0].tolist() == [1] * 7
    for start in range(1, 10):
        assert counts[start : start + 3].sum(axis=0).tolist() == [1] * 7
    assert counts[1:].sum(axis=1).max() <= 3


def test_frozen_is_found_once():
    gradients = sequence(TWO, 8)
    states = track(make(targets=BOTH, method="frozen"), TWO, gradients)
    assert refresh_steps(states) == [0]
    p, q = basis_matrices(at(states, 6), "a")
    best = np.linalg.svd(np.asarray(gradients["a"][0]))[1] ** 2
    assert energy(np.asarray(gradients["a"][0])[None], p, q) > 0.95 * best[:2].sum() / best.sum()


def test_random_is_deterministic_per_seed_and_differs_by_step_and_leaf():
    params = {name: jnp.zeros((6, 10)) for name in "ac"}
    gradients = sequence(params, 4)

    def bases(seed):
        tracker = lro.refresh_basis(2, 2, method="random", seed=seed)
        return track(tracker, params, gradients).reduction_basis

    first, again, other = bases(0), bases(0), bases(1)
    for path in "ac":
        np.testing.assert_array_equal(first[path], again[path])
        assert not np.allclose(first[path], other[path], atol=1e-2)
        start, one, _, two, _ = first[path]
        for left, right in ((start, one), (one, two)):
            overlap = np.linalg.svd(left.T @ right)[1]
            assert overlap.min() < 0.99
        for basis in first[path]:
            assert_orthonormal(basis[None])
    assert not np.allclose(first["a"], first["c"], atol=1e-2)


# Where


def spectrum(shape, target):
    """A gradient with two large singular values, in the leaf's own axes."""
    matrix, back = as_matrix(normal(5, shape), target, shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values[..., 2:] *= 0.2
    return jnp.asarray(back(left * values[..., None, :] @ right), jnp.float32)


@pytest.mark.parametrize("method", ["subspace", "gram"])
def test_bases_are_orthonormal_on_every_side_and_layout(method):
    params, targets = {}, {}
    for name in LAYOUTS:
        # Every side of a plain matrix; of the rest both at once.
        for side in SIDES if name == "wide" else ("smaller",) if name == "tall" else ("both",):
            params[f"{name}_{side}"], targets[f"{name}_{side}"] = layout(name, side)
    gradients = {path: spectrum(shape, targets[path]) for path, shape in params.items()}
    params = {path: jnp.zeros(shape) for path, shape in params.items()}
    tracker = lro.refresh_basis(targets=targets, method=method)
    _, state = jax.jit(tracker.update)(gradients, tracker.init(params))
    for path, target in targets.items():
        name, side = path.rsplit("_", 1)
        matrix, _ = as_matrix(gradients[path], target, LAYOUTS[name][0])
        m, n = matrix.shape[1:]
        p, q = basis_matrices(state, path)
        on_reduction = {"smaller": m <= n, "larger": m >= n, "reduction": True, "output": False}
        assert (p is not None) == (side == "both" or on_reduction[side])
        assert (q is not None) == (side == "both" or not on_reduction[side])
        for basis, size in ((p, m), (q, n)):
            if basis is not None:
                assert basis.shape == (len(matrix), size, 2)
                assert_orthonormal(basis)
        if method != "random":
            values = np.linalg.svd(matrix)[1] ** 2
            best = values[:, :2].sum() / values.sum()
            assert energy(matrix, p, q) > (0.99 if method == "subspace" else 1 - 1e-5) * best


def test_square_leaves_stay_on_their_side():
    params = {"w": jnp.zeros((8, 8))}
    for side, tree in (("smaller", "reduction_basis"), ("larger", "reduction_basis")):
        tracker = lro.refresh_basis(2, 1, side=side)
        state = tracker.init(params)
        update = jax.jit(tracker.update)
        for step in range(3):
            _, state = update(random_like(params, step), state)
            # As a restored checkpoint does: new containers, the same plan.
            state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
            assert getattr(state, tree)["w"].shape == (8, 2)
            assert jax.tree.leaves(state.output_basis) == []


def rotating_gradients(shape, rank, steps, angle, seed=0):
    """Gradients whose leading subspaces turn by an angle a step, on both sides."""
    rng = np.random.default_rng(seed)
    m, n = shape

    def turn(size):
        skew = rng.normal(size=(size, size))
        skew = skew - skew.T
        values, vectors = np.linalg.eig(skew)
        values = values / np.abs(values).max()
        phases = lambda t: np.diag(np.exp(angle * t * values))  # noqa: E731
        return lambda t: np.real(vectors @ phases(t) @ swap(vectors.conj()))

    left, right = turn(m), turn(n)
    middle = np.zeros(shape)
    middle[:rank, :rank] = np.diag(np.linspace(2, 1, rank))
    noise = 0.02 * rng.normal(size=(steps, m, n))
    return np.stack([left(t) @ middle @ right(t).T for t in range(steps)]) + noise


@pytest.mark.parametrize("method", ["subspace", "gram"])
def test_tracker_follows_a_rotating_subspace_on_every_side(method):
    """SubTrack++'s tangent is zero on one side, so its subspace never moves there."""
    steps, rank = 40, 3
    params, gradients, targets = {}, {}, {}
    for shape, sides in (((12, 16), SIDES), ((16, 12), ("smaller",)), ((12, 12), ("smaller",))):
        for side in sides:
            path = f"{shape[0]}_{shape[1]}_{side}"
            params[path] = jnp.zeros(shape)
            gradients[path] = jnp.asarray(rotating_gradients(shape, rank, steps, 0.05), jnp.float32)
            targets[path] = lro.Target(rank, side=side)
    moving = track(lro.refresh_basis(every=4, targets=targets, method=method), params, gradients)
    frozen = track(lro.refresh_basis(targets=targets, method="frozen"), params, gradients)
    for path in params:
        kept, lost, best = [], [], []
        for step in range(steps - 8, steps):
            matrix = np.asarray(gradients[path][step], np.float64)
            values = np.linalg.svd(matrix)[1] ** 2
            best.append(values[:rank].sum() / values.sum())
            kept.append(energy(matrix[None], *basis_matrices(at(moving, step + 1), path)))
            lost.append(energy(matrix[None], *basis_matrices(at(frozen, step + 1), path)))
        assert np.mean(kept) > 0.95 * np.mean(best), path
        assert np.mean(lost) < 0.7 * np.mean(best), path


# What a basis is never made of


BAD = {"nan": jnp.nan, "inf": jnp.inf, "-inf": -jnp.inf, "zero": 0.0}


@pytest.mark.parametrize("method", ["subspace", "gram"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_gradient_at_a_refresh_keeps_the_basis_and_tries_again(method, bad):
    gradients = sequence(TWO, 8)
    poison = gradients["a"][3] * 0 if bad == "zero" else gradients["a"][3].at[2, 1].set(BAD[bad])
    gradients["a"] = gradients["a"].at[3].set(poison)
    states = track(make(every=3, targets=BOTH, method=method), TWO, gradients)
    assert refresh_steps(states, 0) == [0, 4, 6]  # retried at 4, and back on the grid
    assert refresh_steps(states, 1) == [0, 3, 6]  # the other leaf does not wait
    assert changed_steps(states, "reduction_basis", "a") == [0, 4, 6]
    for state in (at(states, t) for t in range(9)):
        assert_orthonormal(basis_matrices(state, "a")[0])


def test_frozen_waits_for_its_first_usable_gradient():
    gradients = sequence(TWO, 8)
    gradients["a"] = gradients["a"].at[:2].set(0)
    states = track(make(targets=BOTH, method="frozen"), TWO, gradients)
    assert refresh_steps(states, 0) == [2]
    assert refresh_steps(states, 1) == [0]


def test_retries_go_on_until_a_gradient_is_usable():
    gradients = sequence(TWO, 8)
    gradients["a"] = gradients["a"].at[3:5].set(jnp.nan)
    states = track(make(every=3, targets=BOTH, method="subspace"), TWO, gradients)
    assert refresh_steps(states, 0) == [0, 5, 6]


def test_zero_gradient_at_the_first_step_keeps_the_random_start():
    gradients = jax.tree.map(lambda x: x.at[0].set(0), sequence(TWO, 8))
    tracker = make(every=3, targets=BOTH, method="subspace")
    states = track(tracker, TWO, gradients)
    assert refresh_steps(states) == [1, 3, 6]
    start = tracker.init(TWO)
    for tree, path in (("reduction_basis", "a"), ("output_basis", "w")):
        basis = getattr(states, tree)[path][1]
        np.testing.assert_allclose(basis, getattr(start, tree)[path], atol=1e-6)
        assert_orthonormal(basis[None])
        # No unit vectors: every entry carries some weight.
        assert np.abs(basis).max() < 0.99
        assert (np.abs(basis) > 1e-3).mean() > 0.9


def test_seeds_give_different_starts():
    starts = [lro.refresh_basis(2, seed=s).init(TWO).output_basis["w"] for s in (0, 0, 1)]
    np.testing.assert_array_equal(starts[0], starts[1])
    assert not np.allclose(starts[0], starts[2], atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_rank_deficient_and_tiny_gradients_give_orthonormal_bases(dtype):
    params = {"w": jnp.zeros((12, 16), dtype)}
    gradient = np.outer(np.arange(12), np.ones(16))  # rank 1 of 4 asked for
    for scale in (1, 1e-4, 2e-7):
        updates = {"w": jnp.asarray(scale * gradient, dtype)}
        tracker = lro.refresh_basis(4)
        _, state = jax.jit(tracker.update)(updates, tracker.init(params))
        p, _ = basis_matrices(state)
        assert_orthonormal(p)
        assert energy(gradient[None], p, None) > 0.99


# State


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_basis_dtype(dtype):
    params = {"w": jnp.zeros((12, 16), jnp.bfloat16)}
    gradients = sequence(params, 3)
    states = track(lro.refresh_basis(4, 1, dtype=dtype), params, gradients)
    assert states.reduction_basis["w"].dtype == dtype
    for step in range(4):
        p, _ = basis_matrices(at(states, step))
        assert_orthonormal(p, 1e-5 if dtype == jnp.float32 else 3e-2)


@pytest.mark.parametrize("method", ["subspace", "svd", "gram", "random", "frozen"])
def test_avals_of_the_state_never_change(method):
    params = {"w": jnp.zeros((6, 10), jnp.bfloat16), "bias": jnp.zeros(3), "none": None}
    tracker = lro.refresh_basis(2, lambda t: 2.0, targets=[("w", 2)], method=method, stagger=True)
    state = tracker.init(params)
    _, after = jax.jit(tracker.update)(params, state)
    assert avals(after) == avals(state)
    assert not any(weak for *_, weak in avals(state)[1])
    assert after.plan == state.plan
    assert after.plan.leaves


def test_init_from_shapes_alone_matches_init_from_arrays():
    shapes = jax.eval_shape(lambda: TWO)
    tracker = lro.refresh_basis(2, targets=BOTH)
    for made, expected in zip(
        jax.tree.leaves(tracker.init(shapes)), jax.tree.leaves(tracker.init(TWO)), strict=True
    ):
        np.testing.assert_array_equal(made, expected)


def test_none_leaves_pass():
    params = {"w": jnp.zeros((6, 10)), "static": None, "bias": jnp.zeros(3)}
    tracker = lro.refresh_basis(2)
    gradients = {"w": normal(0, (6, 10)), "static": None, "bias": jnp.ones(3)}
    updates, state = jax.jit(tracker.update)(gradients, tracker.init(params))
    assert updates["static"] is None
    assert state.refreshes.tolist() == [1]


@pytest.mark.parametrize("empty", [{}, [], ()])
def test_empty_tree(empty):
    tracker = lro.refresh_basis(2)
    state = tracker.init(empty)
    updates, state = jax.jit(tracker.update)(empty, state)
    assert updates == empty
    assert state.tracker_count == 1


def test_no_zero_size_arrays_where_nothing_is_projected():
    params = {"bias": jnp.zeros(3)}
    with pytest.warns(UserWarning, match="no leaf is projected"):
        state = lro.refresh_basis(2).init(params)
    assert all(x.size for x in jax.tree.leaves(state))


def test_a_tracker_in_a_chain_watches():
    tx = optax.chain(lro.refresh_basis(2, targets=BOTH), optax.scale(-0.5))
    gradients = random_like(TWO, 1)
    updates, state = jax.jit(tx.update)(gradients, tx.init(TWO), TWO)
    for update, gradient in zip(jax.tree.leaves(updates), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_array_equal(update, -0.5 * gradient)
    assert state[0].refreshes.tolist() == [1, 1]


def test_other_params_than_those_of_init_are_an_error():
    tracker = lro.refresh_basis(2)
    state = tracker.init(TWO)
    with pytest.raises(ValueError, match="made for params with 3"):
        tracker.update({"w": jnp.zeros((10, 6))}, state)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank=0 projects onto nothing"),
        ({"rank": 1.5}, ValueError, r"rank=1.5 as a float is a fraction .* write rank=2"),
        ({"rank": "8"}, TypeError, "rank must be an int or a float, got str '8'"),
        ({"rank": True}, TypeError, "got bool True"),
        ({"rank": jnp.asarray(3)}, TypeError, "static_args"),
        ({"every": 0}, ValueError, 'every=0 must be at least 1 step.*method="frozen"'),
        ({"every": 2.5}, TypeError, "every must be an int or a schedule of the step, got 2.5"),
        ({"every": True}, TypeError, "every must be an int"),
        ({"every": jnp.asarray(3)}, TypeError, r"static_args=\('every',\)"),
        ({"method": "qr"}, ValueError, "method='qr' is not one of 'subspace', 'svd'"),
        ({"side": "left"}, ValueError, "side='left' is not one of 'smaller', 'larger'"),
        ({"dtype": jnp.int32}, ValueError, "dtype=int32 cannot hold a basis"),
    ],
)
def test_constructor_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        unchecked(lro.refresh_basis)(**arguments)


@pytest.mark.parametrize("targets", [[("nothing", 2)], lambda path, leaf: None])
def test_targets_that_match_nothing_are_an_error_that_lists_paths(targets):
    with pytest.raises(ValueError, match=re.escape("leaves: 'a', 'bias', 'w'")):
        lro.refresh_basis(targets=targets).init(TWO)


def test_every_step_still_waits_for_the_step_that_the_state_names():
    """A basis that was migrated from a longer interval keeps the time of its next refresh."""
    tracker = lro.refresh_basis(2, 1)
    state = tracker.init(TWO)._replace(next_refresh=jnp.asarray([0, 5], jnp.int32))
    _, state = jax.jit(tracker.update)(at(sequence(TWO, 1), 0), state)
    assert state.refreshes.tolist() == [1, 0]
