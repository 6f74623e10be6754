import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import as_matrix, avals, basis_matrices, lift, project
from tests.helpers.data import LAYOUTS, layout, normal, sequence
from tests.helpers.loops import relaxed, run

NAMES = ("tall", "query", "stack")
PARAMS = {name: normal(i, LAYOUTS[name][0]) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("side", ["smaller", "both"])
def test_against_the_formula(side):
    params = PARAMS | {"bias": jnp.zeros(3)}
    targets = {name: layout(name, side)[1] for name in NAMES} | {"bias": None}
    tracker = lro.refresh_basis(every=2, targets=targets, method="random")
    inner = lro.galore_project(relaxed(optax.adam(0.1, b1=0.8)), tracker)
    tx = lro.error_feedback(inner, b1=0.8)
    gradients = sequence(params, 4)
    _, states, _ = run(tx, params, gradients, apply=False)
    at = lambda tree, t: jax.tree.map(lambda x: x[t], tree)  # noqa: E731
    for name in NAMES:
        target = targets[name]
        error = 0.0
        for t in range(4):
            before, after = at(states, t), at(states, t + 1)
            gradient, _ = as_matrix(gradients[name][t], target, LAYOUTS[name][0])
            p, q = basis_matrices(before.subspace_state.tracker_state, name)
            p2, q2 = basis_matrices(after.subspace_state.tracker_state, name)
            m = np.asarray(optax.tree.get(before.subspace_state, "mu")[name], np.float64)
            rows = 2 if p is not None else gradient.shape[1]
            momentum = lift(m.reshape(len(gradient), rows, -1), p, q)
            total = gradient + error + 0.8 / 0.2 * momentum
            error = total - lift(project(total, p2, q2), p2, q2)
            stored, _ = as_matrix(after.feedback[name], target, LAYOUTS[name][0])
            np.testing.assert_allclose(stored, error, rtol=1e-3, atol=1e-4, err_msg=name)


def test_nothing_is_lost_with_a_fixed_basis_and_no_momentum():
    # The sum of what was applied and what is kept is the sum of the gradients.
    params = {"w": normal(0, (6, 10))}
    tx = lro.error_feedback(
        lro.galore_project(optax.sgd(1.0), lro.refresh_basis(2, 1, method="random")), b1=0.0
    )
    gradients = sequence(params, 6)
    updates, states, _ = run(tx, params, gradients, apply=False)
    np.testing.assert_allclose(
        np.asarray(gradients["w"]).sum(0),
        states.feedback["w"][-1] - np.asarray(updates["w"]).sum(0),
        rtol=1e-3,
        atol=1e-4,
    )


def test_ldadamw_is_its_parts_and_moves_everything():
    params = {"w": normal(0, (6, 10)), "bias": jnp.zeros(3)}
    gradients = sequence(params, 3)
    parts = lro.error_feedback(
        lro.galore_project(
            optax.adamw(0.1, 0.8, weight_decay=0.1), lro.refresh_basis(2, 1), scale=0.5
        ),
        b1=0.8,
    )
    one = relaxed(lro.ldadamw(0.1, 2, 0.5, 0.8, weight_decay=0.1))
    left, states, _ = run(one, params, gradients)
    right, _, _ = run(relaxed(parts), params, gradients)
    for path in params:
        np.testing.assert_array_equal(left[path], right[path])
    assert states.subspace_state.tracker_state.refreshes[:, 0].tolist() == [0, 1, 2, 3]
    assert isinstance(states.feedback["bias"], optax.MaskedNode)
    start = one.init(params)
    assert avals(start) == avals(one.update(gradients_at(gradients, 0), start, params)[1])


def test_with_moments_in_few_bits():
    params = {"w": normal(0, (32, 128))}
    gradients = sequence(params, 4)

    def updates_of(inner):
        tx = lro.error_feedback(lro.galore_project(inner, lro.refresh_basis(4, 2)))
        return np.asarray(run(relaxed(tx), params, gradients, apply=False)[0]["w"])

    whole = updates_of(optax.adam(0.1))
    few = updates_of(lro.quantized_moments(optax.adam(0.1), smallest=64))
    assert np.linalg.norm(few - whole) < 0.15 * np.linalg.norm(whole)


def gradients_at(tree, step):
    return jax.tree.map(lambda x: x[step], tree)


def test_a_nan_does_not_stay():
    params = {"w": normal(0, (6, 10))}
    tx = lro.error_feedback(lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2)), b1=0.0)
    gradients = {"w": sequence(params, 3)["w"].at[1].set(jnp.inf)}
    updates, states, _ = run(tx, params, gradients, apply=False)
    assert np.all(np.isfinite(updates["w"][2]))
    assert np.all(np.isfinite(states.feedback["w"][-1]))


def test_compact_gradients_are_refused_by_name():
    params, x = {"w": normal(0, (6, 10))}, normal(1, (4, 6))
    tx = lro.error_feedback(lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2)))
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))
    _, grads, bases = grad_fn(params, opt_state=state)
    with pytest.raises(ValueError, match="'w': error_feedback needs the full gradient"):
        tx.update(grads, state, params, bases=bases)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"b1=1\.0"):
        lro.error_feedback(lro.galore_project(optax.sgd(0.1)), b1=1.0)
    with pytest.raises(ValueError, match="holds 0"):
        lro.error_feedback(optax.sgd(0.1)).init({"w": jnp.zeros((6, 10))})
