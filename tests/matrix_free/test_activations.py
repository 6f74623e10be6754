"""Bases from activations are the principal directions of what flows through each weight."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_optax as lro
from lowrank_optax._arrays import tree
from tests.helpers.assertions import assert_orthonormal
from tests.helpers.data import normal

RANK = 2


def batches(*shape, count=2):
    """Inputs with a few strong directions, so that the leading ones are well separated."""
    strength = jnp.asarray(2.0 ** -np.arange(shape[-1]), jnp.float32)
    return [normal(10 + i, shape) * strength for i in range(count)]


def total(y):
    return jnp.sum(jnp.sin(y))


def leading(rows, rank=RANK):
    """The leading right singular vectors of a matrix of row vectors."""
    return np.linalg.svd(np.asarray(rows, np.float64), full_matrices=False)[2][:rank].T


def assert_columns(got, expected):
    """The same directions in the same order, up to their signs."""
    assert_orthonormal(np.asarray(got, np.float64)[None])
    np.testing.assert_allclose(np.abs(expected.T @ got), np.eye(expected.shape[1]), atol=2e-2)


def capture(loss_fn, params, data, **kwargs):
    return lro.activation_basis(loss_fn, params, data, **({"rank": RANK} | kwargs))


def test_inputs_and_output_gradients_of_a_layer():
    # More than the directions that are iterated, so that it takes iterating.
    w, data = normal(0, (40, 30)), batches(3, 10, 40)
    targets = [("w", RANK)]

    def loss_fn(params, x):
        return total(x @ params["w"])

    found = capture(loss_fn, {"w": w}, data, targets=targets, side="both")["w"]
    x = np.concatenate([np.reshape(b, (-1, 40)) for b in data])
    assert_columns(found.reduction, leading(x))
    deltas = np.cos(x @ np.asarray(w))
    assert_columns(found.output, leading(deltas))


def test_the_gradients_columns_lie_in_what_reaches_the_layer():
    # As many tokens as the rank: then the capture holds all of the gradient.
    w, (x,) = normal(0, (8, 9)), batches(1, RANK, 8, count=1)

    def loss_fn(params, x):
        return total(x @ params["w"])

    (p, _) = capture(loss_fn, {"w": w}, [x])["w"]
    gradient = np.asarray(jax.grad(loss_fn)({"w": w}, x)["w"])
    p = np.asarray(p)
    np.testing.assert_allclose(p @ (p.T @ gradient), gradient, atol=1e-4)


def test_a_scanned_stack_with_remat_and_jit():
    stack, data = 0.5 * normal(1, (3, 8, 8)), batches(4, 8)

    def loss_fn(params, x):
        def block(c, w):
            return jax.jit(jnp.tanh)(c @ w.T.T), None

        return total(jax.lax.scan(jax.checkpoint(block), x, params["w"])[0])

    targets = {"w": lro.Target(RANK, 1, 2)}
    found = capture(loss_fn, {"w": stack}, data, targets=targets)["w"].reduction
    hidden = np.concatenate(data)
    for layer in range(3):
        assert_columns(found[layer], leading(hidden))
        hidden = np.tanh(hidden @ np.asarray(stack[layer]))


def test_attention_and_expert_kernels():
    data = batches(4, 5, 8)
    params = {"q": normal(2, (8, 2, 6)), "e": normal(3, (3, 8, 6))}

    def loss_fn(params, x):
        q = jnp.einsum("btd,dhk->bthk", x, params["q"])
        return total(q) + total(jnp.einsum("btd,edf->betf", x, params["e"]))

    targets = {"q": lro.Target(RANK, 0, (1, 2), "both"), "e": lro.Target(RANK, 1, 2, "reduction")}
    found = capture(loss_fn, params, data, targets=targets)
    x = np.concatenate([np.reshape(b, (-1, 8)) for b in data])
    assert_columns(found["q"].reduction, leading(x))
    deltas = np.cos(np.einsum("td,dhk->thk", x, params["q"])).reshape(len(x), -1)
    assert_columns(found["q"].output.reshape(12, RANK), leading(deltas))
    for expert in range(3):
        assert_columns(found["e"].reduction[expert], leading(x))


def test_an_embedding_and_a_head_that_is_its_transpose():
    table = normal(4, (11, 8))
    ids = [jnp.asarray([[1, 2, 3], [4, 4, 9]]), jnp.asarray([[0, 1, 1], [7, 3, 3]])]
    strength = jnp.asarray(2.0 ** -np.arange(8), jnp.float32)

    def loss_fn(params, ids):
        return total(params["embed"][ids] * strength)

    found = capture(loss_fn, {"embed": table}, ids, targets=[("embed", RANK)])["embed"]
    assert found.reduction is None
    flat = np.concatenate([np.reshape(i, -1) for i in ids])
    assert_columns(found.output, leading(np.cos(np.asarray(table)[flat] * strength) * strength))

    def tied(params, x):
        return total(x @ params["embed"].T)

    # What meets its d side is there the head's input.
    (x,) = batches(6, 8, count=1)
    found = capture(tied, {"embed": table}, [x], targets=[("embed", RANK)])["embed"]
    assert_columns(found.output, leading(x))


def test_learns_from_what_was_captured():
    params, data = {"w": normal(0, (8, 9)), "bias": jnp.zeros(9)}, batches(6, 8)

    def loss_fn(params, x):
        return total(x @ params["w"] + params["bias"])

    bases = capture(loss_fn, params, data)
    state = lro.learn_basis(RANK, init=bases).init(params)
    np.testing.assert_allclose(
        np.abs(state.reduction_basis["w"].T @ bases["w"].reduction), np.eye(RANK), atol=1e-5
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x + y))), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = layers(name="layers")(nn.Embed(20, 8)(ids), None)
        return nn.Dense(20, name="lm_head")(x)


def test_an_unmodified_flax_model():
    """Of another batch's gradient, the captured bases hold far more than random ones."""
    model = Model()
    data = [jax.random.randint(jax.random.key(i), (4, 12), 0, 20) for i in range(3)]
    params = model.init(jax.random.key(9), data[0])

    def loss_fn(params, ids):
        return total(model.apply(params, ids))

    found = capture(loss_fn, params, data[1:], rank=3)
    gradients = tree.by_path(jax.grad(loss_fn)(params, data[0]))
    start = lro.refresh_basis(3, method="random").init(params)
    leaves = start.plan.projections
    assert sorted(found) == sorted(leaf.path for leaf in leaves)
    assert len(found) == 6
    captured, by_chance = [], []
    for leaf, random in zip(leaves, start.encoders(), strict=True):
        g = gradients[leaf.path]
        for basis, kept in ((found[leaf.path], captured), (random, by_chance)):
            kept.append(float(jnp.sum(leaf.view.project(g, basis) ** 2) / jnp.sum(g**2)))
    assert np.mean(captured) > 0.7
    assert np.mean(captured) > 1.8 * np.mean(by_chance)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, x: total(x @ jnp.sin(p["w"])), "'w': .* cannot see what 'sin' multiplies"),
        (lambda p, x: total(x) + 0 * p["bias"].sum(), "'w': no finite, nonzero activation"),
        (lambda p, x: total(0 * x @ p["w"]), "no finite, nonzero activation meets the reduction"),
        (lambda p, x: total(jnp.nan * x @ p["w"]), "no finite, nonzero activation"),
        (lambda p, x: x @ p["w"], "must be a scalar"),
    ],
    ids=["primitive", "unused", "zero", "nan", "shape"],
)
def test_errors(loss_fn, message):
    params = {"w": normal(0, (8, 9)), "bias": jnp.zeros(9)}
    with pytest.raises((ValueError, TypeError), match=message):
        capture(loss_fn, params, batches(6, 8))


def test_no_batches():
    with pytest.raises(ValueError, match="batches is empty"):
        capture(lambda p, x: total(x @ p["w"]), {"w": normal(0, (8, 9))}, iter([]))
