"""Whose array is this? The owner of every array of an optimizer state: its field and its weight.

An optimizer keeps, somewhere in its state, trees that mirror the params: one array a weight. Which
subtrees these are is asked of the optimizer itself, by ``optax.tree_utils.tree_map_params``: it
initialises the optimizer on a placeholder, which then stands wherever params are mirrored. Inside
a mirror an array's name is that of its weight, whole, and never an ending of a longer path.

Where an optimizer cannot be initialised on a placeholder, or is not at hand, a mirror is the
outermost subtree of which every array is reached by the very keys that lead to a weight in params.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import Leaf, unbox
from lowrank_optax._arrays.tree import Keys, OptState, PyTree
from lowrank_optax._inner.roles import MOMENTS, field_names, field_roles


class Site(NamedTuple):
    """One array of an optimizer state.

    Attributes:
        name: its whole path in the state.
        trail: the nodes with named fields that it is inside of, from the outermost in, each with
            the name of the field; the user's own containers, inside a mirror, are not in it.
        path: its path below that field, or below the mirror of params that it is in.
        weight: that path where it is in a mirror, which is the path of its weight; it goes on below
            the weight's where an optimizer keeps several arrays of a weight. None elsewhere.
        value: the array.
    """

    name: str
    trail: tuple[tuple[Any, str], ...]
    path: str
    weight: str | None
    value: Any

    @property
    def owner(self) -> Any:
        """The state node that holds it, None for an array outside any."""
        return self.trail[-1][0] if self.trail else None

    @property
    def field(self) -> str:
        """The field of ``owner`` that it is in."""
        return self.trail[-1][1] if self.trail else ""

    @property
    def role(self) -> str | None:
        """What the field is as a moment, None if it is none or belongs to no weight."""
        if self.weight is None:
            return None
        return field_roles(self.owner).get(self.field)

    @property
    def outer_role(self) -> str | None:
        """The role of the outermost field around it that has one, whosever the array is."""
        found = (field_roles(node).get(field) for node, field in self.trail)
        return next((role for role in found if role), None)

    @property
    def title(self) -> str:
        """The array's name for people."""
        field = f"{type(self.owner).__name__}.{self.field}" if self.trail else ""
        return " of ".join(part for part in (field, self.path and repr(self.path)) if part)


def sites(state: PyTree, mirrors: Collection[Keys]) -> list[Site]:
    """Every array of an optimizer state, in the order of its leaves.

    Args:
        state: an optimizer state, through any wrapper; shapes will do.
        mirrors: the keys that lead to each subtree that mirrors params.

    Returns:
        One :class:`Site` a leaf of ``tree.flatten(state)``.
    """
    nodes: dict[Keys, Any] = {(): state}

    def site(keys: Keys, value: Leaf) -> Site:
        depth = next((d for d in range(len(keys) + 1) if keys[:d] in mirrors), None)
        trail, below = [], 0
        for number, key in enumerate(keys if depth is None else keys[:depth]):
            node, here = nodes[keys[:number]], keys[: number + 1]
            if getattr(key, "name", None) in field_names(node):
                trail.append((node, key.name))
                below = number + 1
            if here not in nodes:
                nodes[here] = _child(node, key)
        path = tree.path_name(keys[below if depth is None else depth :])
        weight = None if depth is None else path
        return Site(tree.path_name(keys), tuple(trail), path, weight, unbox(value))

    return [site(keys, value) for keys, value in _pairs(state)]


def mirrors(state: PyTree, params: PyTree, tx: Any = None) -> frozenset[Keys]:
    """The keys that lead to each subtree of an optimizer state that mirrors params.

    Args:
        state: the state.
        params: the tree that it was made for.
        tx: the optimizer that made it, if it is at hand.
    """
    found = None if tx is None else _mirrors_by_placeholder(tx, state)
    return _mirrors_by_keys(state, params) if found is None else found


def _mirrors_by_placeholder(tx: Any, state: PyTree) -> frozenset[Keys] | None:
    marker = object()
    try:
        with warnings.catch_warnings():  # what init says was said when the state was made
            warnings.simplefilter("ignore")
            # With every mirror a leaf, what is mapped over is the mirror as a whole.
            marked = optax.tree_utils.tree_map_params(
                tx.init, lambda _: marker, state, is_leaf=lambda _: True
            )
    except Exception:
        # Nobody has promised that an optimizer can be initialised on what holds no array.
        return None
    pairs = jax.tree_util.tree_flatten_with_path(marked, is_leaf=lambda x: x is marker)[0]
    return frozenset(keys for keys, value in pairs if value is marker)


def _mirrors_by_keys(state: PyTree, params: PyTree) -> frozenset[Keys]:
    known = {keys for keys, _ in _pairs(params)}
    leaves = [keys for keys, value in _pairs(state) if value is not None]
    if known == {()}:
        # Params that are one array are reached by no key: what mirrors them is told by its field.
        return frozenset(k for k in leaves if k and getattr(k[-1], "name", None) in MOMENTS)
    odd = {keys[:d] for keys in leaves for d in range(len(keys) + 1) if keys[d:] not in known}
    inside = ((keys[:d] for d in range(len(keys) + 1) if keys[:d] not in odd) for keys in leaves)
    outermost = (next(candidates, None) for candidates in inside)
    return frozenset(keys for keys in outermost if keys is not None)


def _pairs(state: PyTree) -> list[tuple[Keys, Any]]:
    return jax.tree_util.tree_flatten_with_path(state, is_leaf=tree.is_leaf)[0]


def _child(node: OptState, key: Any) -> Any:
    """What a key of a JAX path leads to; None where that cannot be told."""
    for attribute in ("key", "idx"):
        if hasattr(key, attribute):
            try:
                return node[getattr(key, attribute)]
            except (TypeError, KeyError, IndexError):
                return None
    return getattr(node, key.name, None) if hasattr(key, "name") else None


def kept_fields(found: Sequence[Site], weights: Collection[str]) -> list[str]:
    """Names of state fields that belong to some weights and are not recognised as moments.

    Args:
        found: the sites of an inner optimizer's state.
        weights: paths of weights.
    """
    kept = (site for site in found if site.weight in weights and site.trail and site.role is None)
    return list(dict.fromkeys(f"{type(site.owner).__name__}.{site.field}" for site in kept))
