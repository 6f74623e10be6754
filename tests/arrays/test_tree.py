"""Names of leaves, boxes, and computations that same-shape leaves share."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowrank_optax as lro
from lowrank_optax._arrays.boxes import is_box, rebox, unbox
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._arrays.tree import (
    by_path,
    flatten,
    flatten_with_paths,
    sparse_tree,
    unflatten,
    with_leaves,
)

X = jnp.ones((2, 3))


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object


class Module(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None


def names(tree):
    return flatten_with_paths(tree)[0]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": {"b": X}, "c": X}, ["a/b", "c"]),
        ({"layers": [X, X]}, ["layers/0", "layers/1"]),
        ([(X, X), (X, X)], ["0/0", "0/1", "1/0", "1/1"]),
        (Pair(X, {"x": X}), ["left", "right/x"]),
        (Layer(X, X), ["kernel", "bias"]),
        ({"m": Module(X, None)}, ["m/weight", "m/bias"]),
        ({1: X, 2: X}, ["1", "2"]),
        ({"mlp/~/linear_0": {"w": X}}, ["mlp/~/linear_0/w"]),
        ({"a": None, "b": X}, ["a", "b"]),
        ({"a": optax.MaskedNode(), "b": X}, ["b"]),
        ({"value": X, "value_proj": {"kernel": X}}, ["value", "value_proj/kernel"]),
        ({"attn": {"value": {"kernel": X}}}, ["attn/value/kernel"]),
        (X, [""]),
        ({}, []),
    ],
)
def test_path_names(tree, expected):
    assert names(tree) == expected


def boxes():
    return {
        "partitioned": nn.Partitioned(X, ("x", None)),
        "logical": nn.LogicallyPartitioned(X, ("embed", None)),
        "variable": nnx.Param(X),
        "variable with metadata": nnx.Param(X, note="mine"),
    }


@pytest.mark.parametrize("name", boxes())
def test_boxes(name):
    box = boxes()[name]
    assert is_box(box)
    np.testing.assert_array_equal(unbox(box), X)
    assert isinstance(unbox(box), jax.Array)
    # A box is one leaf with the name of its place, as the bare array has it.
    paths, leaves, treedef = flatten_with_paths({"layer": {"kernel": box}})
    assert paths == names({"layer": {"kernel": X}}) == ["layer/kernel"]
    assert leaves[0] is box
    # Reboxed: same kind and metadata, another array.
    other = rebox(box, 2 * X)
    assert type(other) is type(box)
    assert jax.tree.structure(other) == jax.tree.structure(box)
    np.testing.assert_array_equal(unbox(other), 2 * X)
    np.testing.assert_array_equal(unbox(box), X)
    restored = unflatten(treedef, [other])
    assert jax.tree.structure(restored) == jax.tree.structure({"layer": {"kernel": box}})


@pytest.mark.parametrize("thing", [X, None, optax.MaskedNode(), {"a": X}, Module(X, None), 1.0])
def test_what_is_no_box(thing):
    assert not is_box(thing)
    assert unbox(thing) is thing
    assert rebox(thing, 3) == 3


def test_names_are_the_same_for_init_and_update():
    """``init`` sees an NNX state of variables, ``update`` may see pure arrays."""
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    boxed = nnx.state(model, nnx.Param)
    assert names(boxed) == names(nnx.to_pure_dict(boxed))
    assert names(boxed) == names(jax.tree.map(lambda x: x, boxed))
    assert "value/kernel" in names(boxed)


def test_sparse_trees():
    _, treedef = flatten({"a": X, "b": X, "c": None})
    tree = sparse_tree(treedef, [None, 2 * X, None])
    assert isinstance(tree["a"], optax.MaskedNode)
    assert isinstance(tree["c"], optax.MaskedNode)
    assert list(by_path(tree)) == ["b"]
    assert len(jax.tree.leaves(tree)) == 1


def test_with_leaves():
    tree = {"a": X, "b": optax.MaskedNode(), "c": nnx.Param(X)}
    changed = with_leaves(tree, {"a": 2 * X, "c": 3 * X, "elsewhere": X})
    assert jax.tree.structure(changed) == jax.tree.structure(tree)
    np.testing.assert_array_equal(changed["a"], 2 * X)
    np.testing.assert_array_equal(unbox(changed["c"]), 3 * X)


# map_sharing ------------------------------------------------------------------------------


def affine(static, x, tree):
    return {"y": static * x + tree["b"], "sum": jnp.sum(x)}


def calls_of(shapes, statics):
    rng = np.random.default_rng(0)
    return [
        (static, (jnp.float32(rng.normal(size=shape)), {"b": jnp.float32(rng.normal())}))
        for shape, static in zip(shapes, statics, strict=True)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_map_sharing_is_a_plain_loop(compiled):
    shapes = [(2, 3), (3, 2), (2, 3), (2, 3), (3, 2), (4,), (2, 3)]
    statics = [1, 1, 1, 2, 1, 1, 1]
    calls = calls_of(shapes, statics)

    def shared(arguments):
        return map_sharing(affine, list(zip(statics, arguments, strict=True)))

    results = (jax.jit(shared) if compiled else shared)([arguments for _, arguments in calls])
    for (static, arguments), result in zip(calls, results, strict=True):
        expected = affine(static, *arguments)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), result, expected)


def test_map_sharing_tells_dtypes_and_structures_apart():
    def double(static, x):
        return jax.tree.map(lambda x: x + x, x)

    calls = [
        (0, (jnp.ones(3),)),
        (0, (jnp.ones(3, jnp.bfloat16),)),
        (0, ([jnp.ones(3)],)),
        (0, (None,)),
    ]
    results = map_sharing(double, calls)
    assert results[0].dtype == jnp.float32
    assert results[1].dtype == jnp.bfloat16
    assert isinstance(results[2], list)
    assert results[3] is None


def test_map_sharing_of_nothing():
    assert map_sharing(affine, []) == []


def test_map_sharing_traces_once_a_group():
    traced = []

    def record(static, x):
        traced.append((static, x.shape))
        return x

    calls = [(0, (jnp.ones(2),))] * 5 + [(1, (jnp.ones(2),))] * 5 + [(0, (jnp.ones(3),))]
    map_sharing(record, calls)
    assert traced == [(0, (2,)), (1, (2,)), (0, (3,))]


def count_equations(jaxpr):
    """Equations of a jaxpr and of all that it holds."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += count_equations(inner)
    return total


@pytest.mark.parametrize("method", ["subspace", "gram"])
def test_a_refresh_grows_little_with_the_number_of_layers(method):
    """Layers of one shape share one refresh: what is left to grow is bookkeeping."""

    def size(layers):
        params = {f"layer_{i}": jnp.ones((16, 24)) for i in range(layers)}
        tracker = lro.refresh_basis(4, method=method)
        state = jax.eval_shape(tracker.init, params)
        jaxpr = jax.make_jaxpr(tracker.update)(params, state).jaxpr
        factorizations = str(jaxpr).count("eigh" if method == "gram" else "cholesky")
        return count_equations(jaxpr), factorizations

    (few, few_factorizations), (many, many_factorizations) = size(2), size(16)
    (one, _) = size(1)
    assert few_factorizations == many_factorizations > 0
    # Sixteen copies would be sixteen times as large as one.
    assert (many - few) / 14 < 0.2 * one
