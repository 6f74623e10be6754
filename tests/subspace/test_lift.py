import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import as_matrix, basis_matrices, lift
from tests.helpers.data import LAYOUTS, SIDES, layout, normal, random_like

pytestmark = pytest.mark.newest


@pytest.mark.parametrize("side", SIDES)
def test_subspace_lift_against_numpy(side):
    params = {name: jnp.zeros(LAYOUTS[name][0]) for name in LAYOUTS}
    targets = {name: layout(name, side)[1] for name in LAYOUTS}
    state = lro.refresh_basis(targets=targets).init(params)
    plan, chosen = state.plan, lro.subspace_lift()
    inputs, cores = [], {}
    bases = state.encoders()
    for number, (leaf, basis) in enumerate(zip(plan.projections, bases, strict=True)):
        update = normal(number, leaf.core_shape)
        cores[leaf.path] = np.asarray(update, np.float64)
        inputs.append(lro.LiftInput(leaf.view, basis, update, update, None))
    lifted, lift_state = chosen.update(inputs, chosen.init(plan))
    assert jax.tree.leaves(lift_state) == []
    for projection, got in zip(plan.projections, lifted, strict=True):
        path = projection.path
        p, q = basis_matrices(state, path)
        matrix, back = as_matrix(params[path], targets[path], got.shape)
        left = 2 if p is not None else matrix.shape[1]
        core = cores[path].reshape(len(matrix), left, -1)
        np.testing.assert_allclose(got, back(lift(core, p, q)), atol=1e-5, err_msg=path)


def doubling_lift():
    """A lift that looks at everything it is given, and counts its steps."""
    seen = []

    def update(targets, state):
        seen.extend(targets)
        return [2 * t.view.lift(t.update, t.bases) for t in targets], state + 1

    return lro.Lift("doubling_lift", lambda plan: jnp.zeros([], jnp.int32), update), seen


def test_a_lift_of_ones_own():
    params = {"w": normal(0, (6, 10)), "tall": normal(1, (10, 6)), "bias": jnp.ones(3)}
    gradients = random_like(params, 1)
    mine, seen = doubling_lift()
    tracker = lro.refresh_basis(2)
    doubled = lro.galore_project(optax.sgd(0.5), tracker, scale=0.25, lift=mine)
    plain = lro.galore_project(optax.sgd(0.5), tracker, scale=0.25)
    left, state = doubled.update(gradients, doubled.init(params), params)
    right, _ = plain.update(gradients, plain.init(params), params)
    for path in ("w", "tall"):
        np.testing.assert_allclose(left[path], 2 * right[path], rtol=1e-5)
    np.testing.assert_array_equal(left["bias"], right["bias"])
    assert int(state.lift_state) == 1
    # It sees the core, the inner update without decay or scale, and the full gradient.
    assert [t.gradient.shape for t in seen] == [(10, 6), (6, 10)]
    for t in seen:
        np.testing.assert_allclose(t.update, -0.5 * t.core, rtol=1e-6)
        np.testing.assert_allclose(t.view.project(t.gradient, t.bases), t.core, atol=1e-5)


def test_a_lift_does_not_see_weight_decay():
    params = {"w": normal(0, (6, 10))}
    mine, seen = doubling_lift()
    inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    tx = lro.galore_project(inner, lro.refresh_basis(2), lift=mine)
    zeros = {"w": jnp.zeros((6, 10))}
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(seen[0].update, 0, atol=1e-6)
    np.testing.assert_allclose(updates["w"], -0.05 * params["w"], rtol=1e-5, atol=1e-6)
