import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.data import normal, sequence
from tests.helpers.loops import run

PARAMS = {"w": normal(0, (6, 10)), "tall": normal(1, (10, 6)), "full": normal(2, (3, 3))}
TARGETS = {"w": lro.Target(2), "tall": lro.Target(2), "full": lro.Target(3)}


def test_lion_momentum_and_a_sign_are_lion():
    gradients = sequence(PARAMS, 4)
    mine = optax.chain(lro.lion_momentum(0.8, 0.95), optax.scale_by_sign())
    left, _, _ = run(mine, PARAMS, gradients)
    right, _, _ = run(optax.scale_by_lion(0.8, 0.95), PARAMS, gradients)
    for path in PARAMS:
        np.testing.assert_array_equal(left[path], right[path])


def test_the_sign_is_that_of_the_lifted_momentum():
    gradients = sequence(PARAMS, 4)
    tracker = lro.refresh_basis(targets=TARGETS, method="random", every=100)
    signed = lro.galore_project(lro.lion_momentum(), tracker, lift=lro.sign_lift())
    plain = lro.galore_project(lro.lion_momentum(), tracker)
    left, _, _ = run(signed, PARAMS, gradients, apply=False)
    right, _, _ = run(plain, PARAMS, gradients, apply=False)
    for path in ("w", "tall"):
        np.testing.assert_array_equal(left[path], np.sign(right[path]))
        assert set(np.unique(left[path])) == {-1.0, 1.0}


def test_lion_in_a_subspace_with_rate_and_decay_behind():
    x = normal(5, (32, 6))
    y = jnp.tanh(x @ normal(6, (6, 10)))

    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)

    tx = optax.chain(
        lro.galore_project(
            lro.lion_momentum(),
            lro.refresh_basis(every=5, targets=[("w", 2)]),
            lift=lro.sign_lift(),
        ),
        optax.add_decayed_weights(0.01),
        optax.scale_by_learning_rate(0.02),
    )
    params = {"w": jnp.zeros((6, 10))}
    state = tx.init(params)
    compact = lro.compact_value_and_grad(loss)

    @jax.jit
    def step(carry, _):
        params, state = carry
        value, grads, bases = compact(params, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return (optax.apply_updates(params, updates), state), value

    _, losses = jax.lax.scan(step, (params, state), length=60)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "inner",
    [optax.lion(1e-3), optax.scale_by_lion(), optax.chain(optax.trace(0.9), optax.scale_by_sign())],
)
def test_an_inner_optimizer_that_takes_the_sign_is_refused(inner):
    tx = lro.galore_project(inner, lro.refresh_basis(targets=TARGETS), lift=lro.sign_lift())
    with pytest.raises(ValueError, match="sign_lift: the inner optimizer takes the sign"):
        tx.init(PARAMS)
    # Without sign_lift they are the user's business, though Lion is warned of.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "galore_project: the inner optimizer is Lion")
        lro.galore_project(inner, lro.refresh_basis(targets=TARGETS)).init(PARAMS)


@pytest.mark.parametrize(
    "inner", [None, optax.trace(0.9), lro.lion_momentum(), optax.adam(1e-3), optax.adafactor(0.1)]
)
def test_others_are_not(inner):
    with jax.numpy_dtype_promotion("standard"):
        tracker = lro.refresh_basis(targets=TARGETS)
        lro.galore_project(inner, tracker, lift=lro.sign_lift()).init(PARAMS)
