"""Learned bases on a mesh: the same training as without one."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from tests.helpers.data import normal
from tests.helpers.loops import relaxed
from tests.scale.test_meshes import (
    TARGETS,
    initial,
    mesh_of,
    moved,
    named,
    placed,
    steps_of,
)

STEPS = 4


@functools.cache
def optimizer(tied):
    return lro.logra_sketch(
        relaxed(optax.adamw(0.05, eps=1e-3, weight_decay=0.1)),
        lro.learn_basis(targets=TARGETS, tied=tied),
        nonlinearity="soft_clip" if tied else "wiener",
        metrics=True,
    )


@functools.cache
def alone(tied):
    tx = optimizer(tied)
    return jax.device_get(jax.jit(lambda p: steps_of(tx, p, tx.init(p), STEPS))(initial()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "placement", "tied"),
    [("explicit", "fsdp_tp", True), ("explicit", "fsdp_tp", False), ("auto", "fsdp_tp", True)],
)
def test_training_is_the_same_on_a_mesh(kind, placement, tied):
    tx, mesh = optimizer(tied), mesh_of(kind)
    with jax.set_mesh(mesh):
        params = placed(initial(), placement, mesh)
        result = jax.jit(lambda p: steps_of(tx, p, tx.init(p), STEPS))(params)
        basis = result[2].tracker_state.reduction_basis["up"]
        # Sharded like the side that it lives on; the auto mesh leaves that to the compiler.
        if kind == "explicit":
            assert tuple(basis.sharding.spec) == (("fsdp", "tp"), None)
    losses, after, state = jax.device_get(result)
    expected_losses, expected, expected_state = alone(tied)
    assert expected_losses[-1] < expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for name, x in expected.items():
        np.testing.assert_allclose(after[name], x, atol=2e-3, err_msg=name)
    assert state.tracker_state.refreshes.tolist() == [STEPS] * 4
    np.testing.assert_allclose(
        state.fidelity.distortion, expected_state.fidelity.distortion, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_no_matrix_is_moved(kind):
    mesh, rank = mesh_of(kind), 4
    tx = lro.logra_sketch(
        optax.sgd(0.1, 0.9), lro.learn_basis(rank, init="random"), nonlinearity="wiener"
    )
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, P("fsdp", "tp"))
        params = {"up": jax.device_put(normal(0, (64, 128)), where)}
        shardings = lro.state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        update = jax.jit(tx.update, out_shardings=(named(params), shardings))
        compiled = update.lower(params, state, params).compile()
    assert max(moved(compiled)) <= 128 * 2 * rank
