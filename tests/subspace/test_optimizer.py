import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import (
    as_matrix,
    avals,
    basis_matrices,
    lift,
    project,
    swap,
    unchecked,
)
from tests.helpers.data import LAYOUTS, at, layout, normal, random_like, regression, sequence
from tests.helpers.loops import relaxed, run, train

# Each layout once, with every side among them.
MIXED = {
    "wide": "smaller",
    "tall": "smaller",
    "square": "both",
    "query": "smaller",
    "out": "both",
    "heads_first": "smaller",
    "stack": "both",
    "stack_in_the_middle": "reduction",
    "experts": "larger",
}
LR, B1, B2, EPS, DECAY, SCALE = 0.1, 0.8, 0.95, 1e-2, 0.3, 0.25


def mixed_params(names=tuple(MIXED)):
    params = {name: normal(i, LAYOUTS[name][0]) for i, name in enumerate(names)}
    targets = {name: layout(name, MIXED[name])[1] for name in names}
    params["bias"], targets["bias"] = normal(99, (5,)), None
    return params, targets


def galore_adamw_by_hand(path, target, shape, moments, gradients, params, states, scale=SCALE):
    """Updates of one leaf: a direct transcription in float64, given the bases of each step."""
    first = second = 0.0
    updates = []
    for t in range(len(gradients)):
        matrix, back = as_matrix(gradients[t], target, shape)
        old = basis_matrices(at(states, t).tracker_state, path)
        new = basis_matrices(at(states, t + 1).tracker_state, path)
        if t and t % 3 == 0 and moments == "reset":
            first = second = 0.0
        if t and t % 3 == 0 and moments == "rotate":
            r, s = (None if b is None else swap(a) @ b for a, b in zip(new, old, strict=True))
            turn = lambda x, r=r, s=s: lift(x, r, s)  # noqa: E731
            squared = [None if x is None else x**2 for x in (r, s)]
            weight1, weight2 = 1 - B1**t, 1 - B2**t
            mean, square = first / weight1, second / weight2
            variance = lift(square - mean**2, *squared)
            first, second = turn(first), weight2 * np.abs(variance + turn(mean) ** 2)
        core = project(matrix, *new)
        first = B1 * first + (1 - B1) * core
        second = B2 * second + (1 - B2) * core**2
        m, v = first / (1 - B1 ** (t + 1)), second / (1 - B2 ** (t + 1))
        direction = m / (np.sqrt(v) + EPS)
        updates.append(
            -LR * (scale * back(lift(direction, *new)) + DECAY * np.asarray(params[t], np.float64))
        )
    return np.stack(updates)


@pytest.mark.parametrize("moments", ["rotate", "keep", "reset"])
def test_galore_project_against_a_direct_transcription(moments):
    names = tuple(MIXED) if moments == "rotate" else ("wide", "square", "experts")
    params, targets = mixed_params(names)
    gradients = sequence(params, 8)
    tx = lro.galore_project(
        relaxed(optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY)),
        lro.refresh_basis(every=3, targets=targets),
        scale=SCALE,
        moments=moments,
    )
    updates, states, seen = run(tx, params, gradients)
    assert states.tracker_state.refreshes[-1].tolist() == [3] * len(names)
    for name in names:
        expected = galore_adamw_by_hand(
            name, targets[name], params[name].shape, moments, gradients[name], seen[name], states
        )
        np.testing.assert_allclose(updates[name], expected, rtol=2e-3, atol=2e-4, err_msg=name)
    # What is no target is trained by the inner optimizer as it is, unscaled.
    plain = relaxed(optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY))
    alone, _, _ = run(plain, {"bias": params["bias"]}, {"bias": gradients["bias"]})
    np.testing.assert_allclose(updates["bias"], alone["bias"], rtol=1e-5, atol=1e-7)


def test_state_holds_cores_and_no_full_sized_moment():
    params, targets = mixed_params()
    tx = lro.galore_project(optax.adam(1e-3), lro.refresh_basis(targets=targets))
    state = tx.init(params)
    mu = optax.tree.get(state, "mu")
    shapes = {name: mu[name].shape for name in MIXED}
    assert shapes == {
        "wide": (2, 10),
        "tall": (10, 2),
        "square": (2, 2),
        "query": (2, 2, 5),
        "out": (2, 2),
        "heads_first": (2, 2, 4),
        "stack": (3, 2, 2),
        "stack_in_the_middle": (3, 2, 10),
        "experts": (2, 2, 6, 2),
    }
    assert mu["bias"].shape == (5,)


def test_filter_is_the_orthogonal_projection():
    params, targets = mixed_params()
    gradients = sequence(params, 3)
    tx = lro.galore_project(basis=lro.refresh_basis(every=2, targets=targets), scale=0.5)
    updates, states, _ = run(tx, params, gradients)
    assert states.inner_state is None
    for name, target in targets.items():
        for t in range(3):
            gradient = np.asarray(gradients[name][t], np.float64)
            expected = gradient
            if target is not None:
                matrix, back = as_matrix(gradient, target, gradient.shape)
                bases = basis_matrices(at(states, t + 1).tracker_state, name)
                expected = 0.5 * back(lift(project(matrix, *bases), *bases))
            np.testing.assert_allclose(updates[name][t], expected, atol=1e-5, err_msg=name)


def test_filter_in_front_of_an_optimizer_trains():
    params, gradient_fn = regression()
    tx = optax.chain(
        lro.galore_project(basis=lro.refresh_basis(3, 5, targets=[("hidden/kernel", 3)])),
        relaxed(optax.adam(1e-2)),
    )
    losses, _, state = train(tx, params, gradient_fn, 60)
    assert losses[-1] < 0.5 * losses[0]
    assert optax.tree.get(state, "refreshes").tolist() == [12]


# Weight decay


def ndim_mask(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def path_mask(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in ("w", "bias"), params)


TREE_MASK = {"w": True, "other": False, "bias": False}
WARMUP = optax.linear_schedule(0.0, 0.1, 4)


def decaying(mask=None):
    """Name -> (an optimizer as a function of its decay, the factor on weights at each step)."""
    warm = [0.1 * t / 4 for t in range(4)]
    return {
        "adamw": (lambda w: optax.adamw(0.1, weight_decay=w, mask=mask), [0.1] * 4),
        "adamw_schedule": (lambda w: optax.adamw(WARMUP, weight_decay=w, mask=mask), warm),
        "lion": (lambda w: optax.lion(0.1, weight_decay=w, mask=mask), [0.1] * 4),
        "adafactor": (
            lambda w: optax.adafactor(0.1, weight_decay_rate=w, weight_decay_mask=mask or True),
            [1.0] * 4,
        ),
        "chain": (
            lambda w: optax.chain(
                optax.trace(0.9),
                optax.add_decayed_weights(w, mask),
                optax.scale_by_learning_rate(0.1),
            ),
            [0.1] * 4,
        ),
        "injected": (
            lambda w: optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
                learning_rate=WARMUP, weight_decay=w, mask=mask
            ),
            warm,
        ),
    }


# It warns that Lion belongs after the lift; its decay is right all the same.
@pytest.mark.filterwarnings("ignore:.*Lion:UserWarning")
@pytest.mark.parametrize("name", decaying())
def test_decay_acts_on_the_whole_weight_and_scale_does_not(name):
    params = {"w": normal(0, (6, 10)), "bias": normal(1, (4,))}
    gradients = sequence(params, 4)
    make, factors = decaying()[name]

    def updates(decay):
        tracker = lro.refresh_basis(2, 2)
        tx = lro.galore_project(relaxed(make(decay)), tracker, scale=SCALE)
        result, states, _ = run(tx, params, gradients, apply=False)
        assert states.tracker_state.refreshes[-1].tolist() == [2]
        return result

    with_decay, without = updates(0.5), updates(0.0)
    for path, weight in params.items():
        for t, factor in enumerate(factors):
            np.testing.assert_allclose(
                with_decay[path][t] - without[path][t], -0.5 * factor * weight, atol=1e-5
            )


@pytest.mark.parametrize(
    ("mask", "decayed"),
    [
        (TREE_MASK, ["w"]),
        (ndim_mask, ["w", "other"]),
        (path_mask, ["w", "bias"]),
    ],
    ids=["pytree", "by_ndim", "by_path"],
)
def test_decay_masks(mask, decayed):
    params = {"w": normal(0, (6, 10)), "other": normal(1, (10, 6)), "bias": normal(2, (4,))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = lro.galore_project(
        relaxed(optax.adamw(0.1, weight_decay=0.5, mask=mask)), lro.refresh_basis(2), scale=SCALE
    )
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    for path, weight in params.items():
        expected = -0.05 * weight if path in decayed else 0 * weight
        np.testing.assert_allclose(updates[path], expected, atol=1e-6, err_msg=path)


def test_decay_inside_equals_decay_behind():
    params = {"w": normal(0, (6, 10)), "tall": normal(1, (10, 6)), "bias": normal(2, (4,))}
    gradients = sequence(params, 6)
    inside = lro.galore_project(
        relaxed(optax.adamw(LR, weight_decay=DECAY)), lro.refresh_basis(2, 3), scale=1.0
    )
    behind = optax.chain(
        lro.galore_project(relaxed(optax.scale_by_adam()), lro.refresh_basis(2, 3)),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(LR),
    )
    (left, *_), (right, *_) = run(inside, params, gradients), run(behind, params, gradients)
    for path in params:
        np.testing.assert_allclose(left[path], right[path], rtol=1e-4, atol=1e-6)


def test_full_rank_target_equals_adamw_exactly():
    params = {"w": normal(0, (6, 10)), "bias": normal(2, (4,))}
    gradients = sequence(params, 4)
    plain = relaxed(optax.adamw(1e-2, weight_decay=0.1))
    tx = lro.galore_project(plain, lro.refresh_basis(targets=[("w", 1.0)]))
    assert "P = I" in str(lro.describe(tx, params))
    (left, *_), (right, *_) = run(tx, params, gradients), run(plain, params, gradients)
    for path in params:
        np.testing.assert_array_equal(left[path], right[path])


def test_full_rank_targets_are_scaled_like_their_neighbours_but_for_decay():
    params = {"w": normal(0, (6, 10)), "bias": normal(2, (4,))}
    gradients = sequence(params, 3)
    tx = lro.galore_project(
        relaxed(optax.adamw(LR, weight_decay=DECAY)),
        lro.refresh_basis(targets=[("w", 6)]),
        scale=SCALE,
    )
    updates, _, _ = run(tx, params, gradients, apply=False)
    plain, _, _ = run(relaxed(optax.adam(LR)), params, gradients, apply=False)
    np.testing.assert_allclose(
        updates["w"], SCALE * plain["w"] - LR * DECAY * params["w"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        updates["bias"], plain["bias"] - LR * DECAY * params["bias"], rtol=1e-4, atol=1e-6
    )


# Any optimizer


INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02),
    "adafactor": lambda: optax.adafactor(0.05),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "adagrad": lambda: optax.adagrad(0.2),
    "adabelief": lambda: optax.adabelief(0.02),
    "amsgrad": lambda: optax.amsgrad(0.02),
    "yogi": lambda: optax.yogi(0.05),
    "novograd": lambda: optax.novograd(0.02),
    "nadamw": lambda: optax.nadamw(0.02),
    "adan": lambda: optax.adan(0.05),
    "sm3": lambda: optax.sm3(0.1),
    # Its trust ratio is that of the core to the weight's core, PᵀW, not to the whole weight.
    "lamb": lambda: optax.lamb(0.05),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.02)),
    "muon": lambda: optax.contrib.muon(0.05),
}


@pytest.mark.filterwarnings("ignore:.*Lion:UserWarning")
@pytest.mark.parametrize("name", INNER)
def test_inner_optimizers_train(name):
    params, gradient_fn = regression()
    tracker = lro.refresh_basis(4, 10, targets=[("hidden/kernel", 4)])
    tx = lro.galore_project(relaxed(INNER[name]()), tracker)
    losses, after, state = train(tx, params, gradient_fn, 80)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.6 * losses[0]
    assert optax.tree.get(state, "refreshes").tolist() == [8]
    # The projected weight moved, and by no more than its subspaces allow.
    moved = np.asarray(after["hidden"]["kernel"] - params["hidden"]["kernel"])
    assert np.abs(moved).max() > 1e-3
    assert avals(state) == avals(tx.init(params))


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, value, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = {"w": normal(0, (6, 10)), "bias": jnp.ones(3)}
    tx = lro.galore_project(inner, lro.refresh_basis(2))
    filtered = lro.galore_project(basis=lro.refresh_basis(2))
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(params, state, params, value=jnp.asarray(3.0), unknown=1.0)
    expected, _ = filtered.update(params, filtered.init(params), params)
    np.testing.assert_allclose(updates["w"], 3 * expected["w"], rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], 3.0)
    with pytest.raises(TypeError, match="value"):
        tx.update(params, state, params)


def test_reduce_on_plateau_works_inside():
    params, gradient_fn = regression()
    inner = optax.chain(optax.sgd(0.1), relaxed(optax.contrib.reduce_on_plateau(patience=1)))
    tx = lro.galore_project(inner, lro.refresh_basis(3, 5, targets=[("hidden/kernel", 3)]))
    losses, _, state = train(tx, params, gradient_fn, 20, value=True)
    assert losses[-1] < losses[0]
    assert optax.tree.get(state, "refreshes").tolist() == [4]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_params_may_be_none_where_the_inner_optimizer_needs_none(scale):
    params = {"w": normal(0, (6, 10)), "full": normal(1, (3, 5)), "bias": jnp.ones(3)}
    gradients = random_like(params, 1)
    tracker = lro.refresh_basis(targets=[("w", 2), ("full", 3)])
    tx = lro.galore_project(relaxed(optax.adam(0.1)), tracker, scale=scale)
    state = tx.init(params)
    without, _ = jax.jit(lambda g, s: tx.update(g, s))(gradients, state)
    given, _ = jax.jit(tx.update)(gradients, state, params)
    for path in params:
        np.testing.assert_allclose(without[path], given[path], rtol=1e-6)


def test_params_none_is_the_inner_optimizers_own_error_where_it_needs_them():
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(relaxed(optax.adamw(0.1)), lro.refresh_basis(2))
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))


def test_scale_may_be_traced():
    params = {"w": normal(0, (6, 10)), "full": normal(1, (3, 5)), "bias": jnp.ones(3)}
    tracker = lro.refresh_basis(targets=[("w", 2), ("full", 3)])

    @jax.jit
    def update(scale):
        tx = lro.galore_project(optax.sgd(0.1), tracker, scale=scale)
        return tx.update(params, tx.init(params), params)[0]

    one, half = update(jnp.float32(1.0)), update(jnp.float32(0.5))
    for path in ("w", "full"):
        np.testing.assert_allclose(half[path], 0.5 * one[path], rtol=1e-6)
    np.testing.assert_allclose(half["bias"], one["bias"])


# Dtypes

DTYPES = ("float32", "bfloat16", "float16")


def test_updates_have_the_dtype_of_the_parameters_and_state_is_float32():
    """optax.contrib.galore fails in lax.cond on bf16 gradients of f32 parameters."""
    pairs = [(p, g) for p in DTYPES for g in DTYPES]
    # A gradient of the rank that is kept, so that nothing depends on the random starts.
    weight, gradient = normal(1, (6, 10)), jnp.matmul(normal(2, (6, 2)), normal(3, (2, 10)))
    params = {f"{p}_{g}": weight.astype(p) for p, g in pairs}
    gradients = {f"{p}_{g}": gradient.astype(g) for p, g in pairs}
    inner = optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.5), optax.scale(-0.1))
    tx = lro.galore_project(inner, lro.refresh_basis(2))
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(gradients, state, params)
    assert avals(after) == avals(state)
    assert after.tracker_state.refreshes.tolist() == [1] * len(pairs)
    for name in params:
        assert updates[name].dtype == params[name].dtype, name
        assert optax.tree.get(after, "trace")[name].dtype == jnp.float32
        assert after.tracker_state.reduction_basis[name].dtype == jnp.float32
        expected = -0.1 * (np.asarray(gradient) + 0.5 * np.asarray(weight))
        tolerance = 1e-5 if name == "float32_float32" else 5e-3
        np.testing.assert_allclose(np.float32(updates[name]), expected, atol=tolerance)


def test_filter_keeps_the_dtype_of_the_gradient():
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(basis=lro.refresh_basis(2))
    updates, _ = jax.jit(tx.update)({"w": normal(0, (6, 10), jnp.bfloat16)}, tx.init(params))
    assert updates["w"].dtype == jnp.bfloat16


def test_mu_dtype_of_the_inner_optimizer_is_respected():
    params = {"w": normal(0, (6, 10))}
    inner = relaxed(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    tx = lro.galore_project(inner, lro.refresh_basis(2, 1))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(3):
        _, after = update(random_like(params, step), state, params)
        assert avals(after) == avals(state)
        state = after
    assert optax.tree.get(state, "mu")["w"].dtype == jnp.bfloat16


# Compilation


def count_primitives(jaxpr, name):
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    total += count_primitives(sub, name)
    return total


@pytest.mark.parametrize("method", ["subspace", "svd"])
def test_layers_of_one_shape_share_one_refresh(method):
    def factorizations(layers):
        params = {f"layer_{i}": jnp.zeros((6, 10)) for i in range(layers)}
        tx = lro.galore_project(optax.sgd(0.1, 0.9), lro.refresh_basis(2, method=method))
        state = jax.eval_shape(tx.init, params)
        jaxpr = jax.make_jaxpr(tx.update)(params, state, params).jaxpr
        return count_primitives(jaxpr, {"subspace": "cholesky", "svd": "svd"}[method])

    assert factorizations(2) == factorizations(8) > 0


def test_refresh_is_one_branch_that_is_skipped_between_refreshes():
    params = {f"layer_{i}": jnp.zeros((6, 10 + i)) for i in range(3)}
    tracker = lro.refresh_basis(2)
    jaxpr = jax.make_jaxpr(tracker.update)(params, tracker.init(params)).jaxpr
    # Outside the one cond there is no arithmetic on gradients at all.
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("cond") == 1
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not outside & {"dot_general", "while", "scan", "cholesky"}


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inner": 1e-3}, TypeError, r"inner must be a gradient transformation .*got 0.001"),
        ({"inner": optax.adam}, TypeError, r"such as optax.adamw\(1e-3\), got <function adam"),
        ({"basis": 128}, TypeError, r"such as lro.refresh_basis\(rank=128\), got 128"),
        ({"moments": "rotated"}, ValueError, "moments='rotated' is not one of 'rotate', 'keep'"),
        ({"lift": "fira"}, TypeError, r"lift must be a lift such as lro.subspace_lift\(\)"),
    ],
)
def test_constructor_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        unchecked(lro.galore_project)(**arguments)


def test_basis_must_be_a_tracker():
    params = {"w": normal(0, (6, 10))}
    with pytest.raises(ValueError, match="holds 0 trackers"):
        lro.galore_project(optax.sgd(0.1), optax.adam(1e-3)).init(params)
    two = optax.chain(lro.refresh_basis(2), lro.refresh_basis(2))
    with pytest.raises(ValueError, match="holds 2 trackers"):
        lro.galore_project(optax.sgd(0.1), two).init(params)


def test_a_wrapped_tracker_is_a_basis():
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(optax.sgd(0.1), optax.chain(lro.refresh_basis(2)))
    direct = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2))
    left, _ = tx.update(params, tx.init(params), params)
    right, _ = direct.update(params, direct.init(params), params)
    np.testing.assert_allclose(left["w"], right["w"], rtol=1e-6)


def test_params_of_another_structure_are_an_error_that_says_so():
    params = {"a": normal(0, (6, 10)), "b": normal(1, (6, 10))}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2))
    with pytest.raises(ValueError, match=r"updates or params has 1 leaves, .* with 2; call init"):
        tx.update(params, tx.init(params), {"a": params["a"]})
