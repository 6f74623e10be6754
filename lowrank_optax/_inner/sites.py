"""Where each array of an optimizer state belongs: to which field, which weight, which space."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.orthonormal import dual
from lowrank_optax._arrays.tree import find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner.roles import field_roles
from lowrank_optax._plan.plan import LeafPlan
from lowrank_optax._plan.view import Bases
from lowrank_optax._subspace.state import SubspaceState


class Space(NamedTuple):
    """The coordinates that an array is in: those of a target's bases, or the leaf's own.

    Attributes:
        leaf: the plan of the weight; None where the array is in the weight's own shape.
        bases: its bases, those that project.
        orthonormal: whether their columns are.
    """

    leaf: LeafPlan | None = None
    bases: Bases = Bases()
    orthonormal: bool = True

    def duals(self) -> Bases:
        """What takes coordinates back to the weight's own shape."""
        if self.orthonormal or self.leaf is None or self.leaf.view is None:
            return self.bases
        batch_ndim = len(self.leaf.view.batch_axes)
        return Bases(*(None if b is None else dual(b, batch_ndim) for b in self.bases))

    def is_nested(self, new: "Space") -> bool:
        """Whether ``new`` shares coordinates with this space, by how bases are carried.

        The first ``min(r, r')`` columns of the two bases then are the same.
        """
        old = self.leaf
        if old is None or new.leaf is None:
            return old is new.leaf
        if (old.view, old.sides) != (new.leaf.view, new.leaf.sides):
            return False
        return self.orthonormal or (not new.orthonormal and old.rank == new.leaf.rank)


class Site(NamedTuple):
    """One array of an optimizer state.

    Attributes:
        name: its whole path in the state.
        owner: the state NamedTuple that holds it, None for an array outside any.
        field: the field of ``owner`` that it is in.
        path: its path below that field; the weight's path where it belongs to a weight.
        role: what ``field`` is as a moment, None if it is none.
        space: its coordinates.
        value: the array.
    """

    name: str
    owner: Any
    field: str
    path: str
    role: str | None
    space: Space
    value: Any

    @property
    def kind(self) -> tuple[str, str, str]:
        """What two states' arrays of one meaning share."""
        return type(self.owner).__name__, self.field, self.path

    @property
    def title(self) -> str:
        """The array's name for people."""
        field = f"{type(self.owner).__name__}.{self.field}" if self.owner is not None else ""
        return " of ".join(part for part in (field, self.path and repr(self.path)) if part)

    @property
    def in_tracker(self) -> bool:
        """Whether it is part of a tracker's own state."""
        return isinstance(self.owner, TrackerState)


def _child(node: Any, key: Any) -> Any:
    """What a key of a JAX path leads to; None where that cannot be told."""
    for attribute in ("key", "idx"):
        if hasattr(key, attribute):
            try:
                return node[getattr(key, attribute)]
            except (TypeError, KeyError, IndexError):
                return None
    return getattr(node, key.name, None) if hasattr(key, "name") else None


def _spaces(node: SubspaceState) -> dict[str, Space]:
    spaces = {}
    for tracker in find_states(node.tracker_state, TrackerState):
        for index, basis in zip(tracker.plan.targets, tracker.encoders(), strict=True):
            leaf = tracker.plan.leaves[index]
            spaces[leaf.path] = Space(leaf, basis, tracker.plan.orthonormal)
    return spaces


def sites(state: Any, paths: Sequence[str]) -> list[Site]:
    """Every array of an optimizer state, in the order of its leaves.

    Args:
        state: an optimizer state, through any wrapper.
        paths: the paths of the params that it was made for.

    Returns:
        One :class:`Site` a leaf of ``tree.flatten(state)``.
    """
    known = set(paths)
    by_node: dict[int, dict[str, Space]] = {}

    def site(keys: Sequence[Any], value: Any) -> Site:
        node, owner, field, rest, role = state, None, "", keys, None
        spaces: dict[str, Space] = {}
        for number, key in enumerate(keys):
            name = getattr(key, "name", None)
            if isinstance(node, tuple) and name in getattr(node, "_fields", ()):
                owner, field, rest = node, str(name), keys[number + 1 :]
                role = field_roles(node).get(field)
                if isinstance(node, SubspaceState) and field == "inner_state":
                    if id(node) not in by_node:
                        by_node[id(node)] = _spaces(node)
                    spaces = by_node[id(node)]
                # Below a field that mirrors params the NamedTuples are the user's own.
                if role or tree.path_name(rest) in known:
                    break
            node = _child(node, key)
        path = tree.path_name(rest)
        space = spaces.get(path, Space()) if path in known else Space()
        return Site(tree.path_name(keys), owner, field, path, role, space, unbox(value))

    pairs = jax.tree_util.tree_flatten_with_path(state, is_leaf=tree.is_leaf)[0]
    return [site(keys, value) for keys, value in pairs]
