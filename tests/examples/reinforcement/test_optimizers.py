"""Ranks by class, stages, and where gradients are clipped."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from reinforcement import optimizers

pytestmark = pytest.mark.usefixtures("standard_promotion")


def params_of_a_layer():
    shapes = {
        "layers/mlp/up_proj/kernel": (12, 20),
        "layers/self_attn/q_proj/kernel": (12, 12),
        "embed_tokens/embedding": (16, 12),
        "lm_head/kernel": (12, 16),
        "value_head/kernel": (12, 1),
        "norm/scale": (12,),
    }
    return {path: jnp.ones(shape) for path, shape in shapes.items()}


@pytest.mark.parametrize("name", ["galore", "logra"])
def test_every_class_has_its_own_rank(name):
    ranks = {"mlp": 2, "attention": 3, "embedding": None, "head": 0.5}
    tx = optimizers.make(name, 1e-3, optimizers.Options(ranks))
    rows = {row.path: row.rank for row in lro.describe(tx, params_of_a_layer()).rows}
    assert [rows[path] for path in params_of_a_layer()] == [2, 3, 0, 6, 0, 0]
    tx = optimizers.make(name, 1e-3, optimizers.Options(ranks), ("mlp",))
    rows = {row.path: row.rank for row in lro.describe(tx, params_of_a_layer()).rows}
    assert [rows[path] for path in params_of_a_layer()] == [2, 0, 0, 0, 0, 0]


def test_stages_enable_what_has_a_rank():
    ranks = {"mlp": 2, "attention": 3, "embedding": None, "head": 4}
    stages = optimizers.Stages(ranks, 10)
    last = ("mlp", "attention", "head")
    assert [stages.at(i) for i in (0, 9, 10, 20, 99)] == [last[:1], last[:1], last[:2], last, last]
    assert optimizers.Stages(ranks).at(0) == last
    assert optimizers.Stages(ranks | {"mlp": None}, 10).at(0) == ("attention",)
    assert optimizers.Stages({}).at(0) == ()


@pytest.mark.parametrize("name", ["galore", "logra"])
def test_clipping_comes_after_the_sketch(name):
    """What the subspace leaves out does not shorten what it keeps."""
    options = optimizers.Options({"mlp": 1}, clip=1.0)
    tx = optimizers.make(name, 1e-3, options)
    params = {"mlp/up_proj/kernel": jnp.zeros((4, 6))}
    first = {"mlp/up_proj/kernel": jnp.zeros((4, 6)).at[0, 0].set(0.5)}
    _, state = tx.update(first, tx.init(params), params)

    def mu(gradient):
        _, after = tx.update({"mlp/up_proj/kernel": gradient}, state, params)
        found = optax.tree.get(after, "mu")["mlp/up_proj/kernel"]
        return float(jnp.linalg.norm(found))

    inside = first["mlp/up_proj/kernel"]
    # The norm of both together is 5, and that of the part inside .5, which needs no clipping.
    outside = 5.0 if name == "galore" else 0.2  # a learned basis would follow a large one
    both = mu(inside.at[3, 4].set(outside))
    np.testing.assert_allclose(both, mu(inside), rtol=0.1)
    assert mu(8 * inside) < 0.15  # .9 · .05 + .1 · 1, and not + .1 · 4
