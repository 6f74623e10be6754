"""Saved states carried over on meshes: the same values, in types that training keeps."""

import itertools

import jax
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import avals
from tests.helpers.loops import relaxed
from tests.scale.test_meshes import initial, mesh_of, placed

RANKS = {"up": 3, "down": 3, "stack": 2}


def tx_of(extra):
    rules = [(name, lro.Target(rank + extra, -2, -1)) for name, rank in RANKS.items()]
    return lro.galore_project(adam(), lro.refresh_basis(every=5, targets=rules))


def adam():
    return relaxed(optax.adam(0.05))


CHAIN = [adam(), tx_of(0), tx_of(2), adam()]


def carried(params):
    """The states along a chain of migrations, from one that has seen two gradients."""
    state = CHAIN[0].init(params)
    for _ in range(2):
        _, state = jax.jit(CHAIN[0].update)(params, state, params)
    states = [state]
    for old, new in itertools.pairwise(CHAIN):
        states.append(lro.migrate(states[-1], old, new, params))
    return states


def moments(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
    return next(x for x in found if hasattr(x, "mu"))


@pytest.fixture(scope="module")
def on_one_device():
    return carried(initial())


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.slow)])
def test_values_and_types(kind, on_one_device):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        states = carried(params)
        for tx, state in zip(CHAIN, states, strict=True):
            assert avals(state) == avals(tx.init(params))
            if kind == "explicit":  # where a sharding is part of the type
                after = jax.eval_shape(tx.update, params, state, params)[1]
                assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    # Bases are found up to signs, so cores are compared by what they stand for.
    for here, there in ((states[0], on_one_device[0]), (states[-1], on_one_device[-1])):
        for name in ("mu", "nu"):
            for path, x in getattr(moments(there), name).items():
                got = np.asarray(getattr(moments(here), name)[path])
                np.testing.assert_allclose(got, x, atol=2e-3 * float(np.abs(x).max()))
