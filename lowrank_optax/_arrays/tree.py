"""All tree plumbing: leaves in, leaves out, and names for them.

The rest of the library works on flat lists of leaves, in the order of the params tree. A
*leaf* here is what a person would call one: an array, a boxed array (a Flax ``Variable``
or ``Partitioned``), a compact gradient, or None.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from lowrank_optax._arrays.boxes import Leaf, MaybeBox, is_box, rebox, unbox
from lowrank_optax._arrays.compact import Compact

# What JAX and optax call a pytree: nothing more can be said of it in a type.
PyTree = Any
Params = PyTree
Updates = PyTree
OptState = PyTree
PyTreeDef = Any
Keys = tuple[Any, ...]


def is_leaf(x: PyTree) -> bool:
    return x is None or isinstance(x, Compact) or is_box(x)


def flatten(tree: PyTree) -> tuple[list[MaybeBox], PyTreeDef]:
    """Leaves, with None and boxed arrays each counting as one, and the tree's structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def flatten_with_paths(tree: PyTree) -> tuple[list[str], list[MaybeBox], PyTreeDef]:
    """Like :func:`flatten`, with the name of each leaf in front."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [path_name(path) for path, _ in pairs], [leaf for _, leaf in pairs], treedef


def path_name(path: Keys) -> str:
    """The name of a leaf as a person writes it: ``decoder/layers_0/q/kernel``."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key).strip("./[]'\""))
    return "/".join(parts)


def unflatten(treedef: PyTreeDef, leaves: Sequence[MaybeBox]) -> PyTree:
    return jax.tree.unflatten(treedef, leaves)


def sparse_tree(treedef: PyTreeDef, leaves: Sequence[MaybeBox]) -> PyTree:
    """A tree parallel to params that holds ``optax.MaskedNode()`` where a leaf is None."""
    return unflatten(treedef, [optax.MaskedNode() if leaf is None else leaf for leaf in leaves])


def by_path(tree: PyTree) -> dict[str, Leaf]:
    """The arrays of a sparse tree by their names; masked positions have no entry."""
    paths, leaves, _ = flatten_with_paths(tree)
    return {path: unbox(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def with_leaves(tree: PyTree, replacements: Mapping[str, Leaf]) -> PyTree:
    """``tree`` with some leaves replaced by name, its containers left as they are."""
    paths, leaves, treedef = flatten_with_paths(tree)
    return unflatten(
        treedef,
        [
            rebox(leaf, replacements[path]) if path in replacements else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ],
    )


def find_states(state: OptState, kind: type) -> list[MaybeBox]:
    """Every node of a type in an optimizer state, through any wrapper."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def stands_for_params(tree: PyTree) -> bool:
    """Whether a tree is a placeholder for any params, as ``optax.tree_utils`` uses one.

    It is a node of a class of its own that holds nothing; an empty container is no such thing.
    """
    if isinstance(tree, Mapping | Sequence) or tree is None or dataclasses.is_dataclass(tree):
        return False
    structure = jax.tree.structure(tree)
    return structure.num_leaves == 0 and structure.num_nodes == 1
