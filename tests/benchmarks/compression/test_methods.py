"""What a compression is said to lose is what the optimizer behind it does not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_optax as lro
from benchmarks.compression import methods
from tests.helpers.data import normal


@pytest.mark.parametrize("side", ["smaller", "larger", "both"])
def test_what_is_seen_of_a_gradient_is_its_projection(side):
    params = {"tall": jnp.zeros((32, 16)), "stacked": jnp.zeros((2, 16, 24)), "norm": jnp.zeros(16)}
    grads = {name: normal(number, x.shape) for number, (name, x) in enumerate(params.items())}
    target = lro.Target(4, side=side)
    targets = {"tall": target, "stacked": lro.Target(4, -2, -1, side=side), "norm": None}
    tx = lro.galore_adamw(1e-3, targets=targets)
    with jax.numpy_dtype_promotion("standard"):
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    true, seen = methods._projected(grads, None, state)
    assert true is grads
    np.testing.assert_array_equal(seen["norm"], grads["norm"])
    again = methods._projected(seen, None, state)[1]
    for name in ("tall", "stacked"):
        np.testing.assert_allclose(again[name], seen[name], atol=1e-5)
        assert (np.linalg.matrix_rank(seen[name], tol=1e-4) == 4).all()
        lost = grads[name] - seen[name]
        np.testing.assert_allclose(np.vdot(lost, seen[name]), 0, atol=1e-3)
