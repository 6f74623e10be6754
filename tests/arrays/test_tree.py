"""Names of leaves, and boxes."""

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

from lowrank_optax._arrays.boxes import is_box, rebox, unbox
from lowrank_optax._arrays.tree import (
    by_path,
    flatten,
    flatten_with_paths,
    sparse_tree,
    stands_for_params,
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


def test_a_placeholder_for_params_is_told_from_a_tree_that_is_empty():
    found = []
    optax.tree.map_params(lambda params: found.append(params) or params, lambda x: x, {})
    (placeholder,) = found
    assert stands_for_params(placeholder)
    empty = [{}, [], (), None, optax.EmptyState(), nnx.State({}), jnp.ones(2), {"a": placeholder}]
    assert not any(map(stands_for_params, empty))
