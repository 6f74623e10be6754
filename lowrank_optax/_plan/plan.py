"""What is projected and how, for every leaf of one params tree.

A plan is static: it is made once, at ``init``, and travels in the optimizer state as a
pytree node without leaves. So whoever holds a state, through any wrapper, knows the views,
sides and ranks behind its arrays, and a square leaf can never change sides.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_optax._arrays import tree
from lowrank_optax._bases.storage import read_all, shape_of
from lowrank_optax._plan import layouts
from lowrank_optax._plan.layouts import Kind
from lowrank_optax._plan.target import (
    ByDefault,
    Rank,
    Table,
    Target,
    Targets,
    as_target,
    check_rank,
    entries_of_tree,
    is_table,
)
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View, make_view


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What happens to one leaf.

    Attributes:
        path: the leaf's name, ``decoder/layers/q/kernel``.
        shape: the parameter's shape.
        dtype: the parameter's dtype, by name.
        view: how the leaf is read as matrices; None if it is not a target.
        sides: the sides that have a basis, a subset of ``("reduction", "output")``; empty
            for leaves that are trained full-rank.
        rank: columns of each basis; 0 where there is none.
        note: why a leaf that looks like a target is trained full-rank, for people.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    view: View | None = None
    sides: tuple[str, ...] = ()
    rank: int = 0
    note: str = ""

    @property
    def is_low_rank(self) -> bool:
        """Whether a basis is kept for this leaf."""
        return bool(self.sides)

    @property
    def is_target(self) -> bool:
        """Whether the leaf is a target; its subspace may be the whole space (P = I)."""
        return self.view is not None

    @property
    def core_shape(self) -> tuple[int, ...]:
        """The shape that the inner optimizer sees."""
        if self.view is None or not self.sides:
            return self.shape
        return self.view.core_shape(self.sides, self.rank)


class Plan:
    """The plans of all leaves of a params tree, in its order. Hashable and immutable.

    Attributes:
        leaves: one :class:`LeafPlan` a leaf.
        targets: the numbers of the leaves that have a basis.
        method: how the tracker finds bases.
        seed: the seed of its random draws.
    """

    def __init__(self, leaves: Sequence[LeafPlan] = (), method: str = "", seed: int = 0):
        self.leaves = tuple(leaves)
        self.method = method
        self.seed = seed
        self.targets = tuple(i for i, leaf in enumerate(self.leaves) if leaf.is_low_rank)

    def __repr__(self) -> str:
        return f"Plan({len(self.targets)} of {len(self.leaves)} leaves projected)"

    # The plan of an empty params tree equals any other. optax.tree_utils.tree_map_params
    # pairs a state with one that was made for a placeholder without leaves, and JAX
    # compares the static parts of both.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        if not self.leaves or not other.leaves:
            return True
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.leaves, self.method, self.seed

    def tracked(self, method: str, seed: int) -> "Plan":
        """The same plan with the static facts of its tracker."""
        return Plan(self.leaves, method, seed)

    @property
    def orthonormal(self) -> bool:
        """Whether bases have orthonormal columns; those of an autoencoder may not."""
        return self.method not in ("learn_columns", "learn_none")

    def check_count(self, leaves: Sequence[Any], what: str) -> None:
        """Raises ValueError unless there is one entry for each leaf of the plan."""
        if len(leaves) != len(self.leaves):
            raise ValueError(
                f"{what} has {len(leaves)} leaves, but the optimizer state was made for "
                f"params with {len(self.leaves)}; call init on the params that you update"
            )

    def stored_bases(self, reduction: Any, output: Any) -> list[Bases]:
        """Pairs up the bases of two sparse trees as stored, one entry for each target.

        Raises:
            ValueError: if a basis is of another shape than planned, as in a checkpoint that was
                written with another rank or other targets.
        """
        left, right = tree.by_path(reduction), tree.by_path(output)
        paired = []
        for leaf in (self.leaves[index] for index in self.targets):
            found = Bases(left.get(leaf.path), right.get(leaf.path))
            _check_basis_shapes(leaf, found)
            paired.append(found)
        return paired

    def bases(self, reduction: Any, output: Any) -> list[Bases]:
        """The bases of each target, in a float dtype, from two sparse trees of stored ones."""
        views = [self.leaves[index].view for index in self.targets]
        stored = self.stored_bases(reduction, output)
        return [read_all(b, view) for b, view in zip(stored, views, strict=True) if view]


def _check_basis_shapes(leaf: LeafPlan, bases: Bases) -> None:
    assert leaf.view is not None
    for side in (REDUCTION, OUTPUT):
        expected = leaf.view.basis_shape(side, leaf.rank) if side in leaf.sides else None
        basis = getattr(bases, side)
        got = None if basis is None else shape_of(basis)
        if got != expected:
            raise ValueError(
                f"{leaf.path!r}: the state has {'no' if got is None else 'a'} basis of the {side} "
                f"side{'' if got is None else f' of shape {got}'}, and this optimizer, at rank "
                f"{leaf.rank}, {'none' if expected is None else f'one of shape {expected}'}. The "
                "state comes from another rank or other targets, by way of a checkpoint maybe; "
                "carry it over with lro.migrate(opt_state, old_tx, new_tx, params)"
            )


_STATIC: list[type] = []


def register_static(kind: type) -> None:
    """Makes a hashable class a pytree node without leaves, which an optimizer state may hold."""
    _STATIC.append(kind)
    jax.tree_util.register_pytree_node(kind, lambda node: ((), node), lambda node, _: node)


register_static(Plan)


def _register_with_flax() -> None:
    """Lets ``flax.serialization`` pass over static nodes, where Flax is in use."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    for kind in _STATIC:
        with contextlib.suppress(ValueError):  # registered before
            serialization.register_serialization_state(kind, lambda _: {}, lambda node, _: node)


def _resolve_rank(rank: Rank, view: View, path: str) -> int:
    """A rank in columns, at most the smaller side of the matrices."""
    check_rank(rank, f"{path!r}: rank")
    smaller = min(view.rows, view.columns)
    if isinstance(rank, float | np.floating):
        rank = max(1, round(float(rank) * smaller))
    return min(int(rank), smaller)


def _sides(side: str, view: View) -> tuple[str, ...]:
    if side == "both":
        return (REDUCTION, OUTPUT)
    if side in (REDUCTION, OUTPUT):
        return (side,)
    # On a tie the reduction side, for "smaller" and "larger" alike.
    on_reduction = view.rows <= view.columns if side == "smaller" else view.rows >= view.columns
    return (REDUCTION,) if on_reduction else (OUTPUT,)


def _plan_leaf(
    path: str, leaf: Any, target: Target | None, layout: layouts.Layout, rank: Any, side: str
) -> LeafPlan:
    bare = LeafPlan(path, tuple(leaf.shape), jnp.dtype(leaf.dtype).name)
    if target is None:
        return bare
    if target.reduction_axis is not None and target.output_axis is not None:
        try:
            view = make_view(leaf.shape, target.reduction_axis, target.output_axis)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
    elif layout.view is not None:
        view = layout.view
    elif layout.kind is Kind.VECTOR:
        return bare
    else:
        raise ValueError(
            f"{path!r}: which of the axes of shape {bare.shape} does the layer sum over? No "
            "known layout has this path and shape; say it: lro.Target(rank, "
            "reduction_axis=..., output_axis=...), where axes on neither side are batch axes"
        )
    columns = _resolve_rank(rank if target.rank is None else target.rank, view, path)
    # An embedding (vocabulary, d) and a head (d, vocabulary) are projected on their d side.
    default_side = {Kind.EMBEDDING: OUTPUT, Kind.HEAD: REDUCTION}.get(layout.kind, side)
    if columns >= min(view.rows, view.columns):
        return dataclasses.replace(bare, view=view, note="P = I: the rank is the full rank")
    sides = _sides(target.side or default_side, view)
    return dataclasses.replace(bare, view=view, sides=sides, rank=columns)


def _default_targets(
    paths: Sequence[str],
    all_layouts: Sequence[layouts.Layout],
    rank: Any,
    asked: Sequence[bool] | None = None,
) -> list[Target | None]:
    """Matrices of linear layers whose smaller side is larger than the rank."""
    targets: list[Target | None] = []
    for index, (path, layout) in enumerate(zip(paths, all_layouts, strict=True)):
        if asked is not None and not asked[index]:
            targets.append(None)
            continue
        view = layout.view if layout.kind is Kind.MATRIX else None
        small = view is not None and _resolve_rank(rank, view, path) >= min(view.rows, view.columns)
        targets.append(None if view is None or small else Target())
        if layout.kind is Kind.UNKNOWN:
            warnings.warn(
                f"lowrank_optax: {path!r} has three or more axes in no layout that is known, so "
                "it is trained full-rank. To project it, pass targets=["
                f"({path!r}, lro.Target(rank, reduction_axis=..., output_axis=...)), "
                f"*lro.targets.default()]; to silence this, "
                f"targets=[({path!r}, None), *lro.targets.default()]",
                stacklevel=6,
            )
    return targets


def _table_targets(
    rules: Any, paths: Sequence[str], all_layouts: Sequence[layouts.Layout]
) -> list[Target | None]:
    table = Table(rules)
    matches = [
        table.match(path, layout.kind) for path, layout in zip(paths, all_layouts, strict=True)
    ]
    used = {number for number in matches if number is not None}
    for number, (pattern, _) in enumerate(table.rules):
        if number not in used and used and not table.optional[number]:
            warnings.warn(
                f"lowrank_optax: the target rule {pattern.pattern!r} matched no leaf, or only "
                "leaves that an earlier rule took",
                stacklevel=6,
            )
    return [None if number is None else table.rules[number][1] for number in matches]


def _requested(
    targets: Targets, leaves: dict[str, Any], all_layouts: Sequence[layouts.Layout], rank: Any
) -> list[Target | None]:
    """What the default rule, a table or a callable asks for, leaf by leaf."""
    if targets is None:
        return _default_targets(list(leaves), all_layouts, rank)
    if is_table(targets):
        chosen = _table_targets(targets, list(leaves), all_layouts)
        if not any(isinstance(target, ByDefault) for target in chosen):
            return chosen
        asked = [isinstance(target, ByDefault) for target in chosen]
        defaults = _default_targets(list(leaves), all_layouts, rank, asked)
        return [d if isinstance(t, ByDefault) else t for t, d in zip(chosen, defaults, strict=True)]
    return [as_target(targets(path, leaf), path) for path, leaf in leaves.items()]


def make_plan(params: Any, targets: Targets, rank: Any, side: str) -> Plan:
    """Decides for every leaf of ``params`` whether and how it is projected.

    Args:
        params: a params tree; arrays, ``jax.ShapeDtypeStruct``s, boxed variables or None.
        targets: None for the default rule, a list of ``(regex, entry)``, a pytree of
            entries, or a callable ``(path, leaf) -> entry``.
        rank: the rank of targets that name none.
        side: the side of targets that name none.

    Returns:
        The plan.

    Raises:
        ValueError: if ``targets`` matches no leaf, or an entry does not fit its leaf.
    """
    _register_with_flax()
    all_paths, all_leaves, treedef = tree.flatten_with_paths(params)
    if not all_leaves:
        return Plan()
    if len(set(all_paths)) != len(all_paths):
        twice = next(path for path in all_paths if all_paths.count(path) > 1)
        raise ValueError(f"two leaves of params are both called {twice!r}; rename one of them")
    arrays = [i for i, leaf in enumerate(all_leaves) if leaf is not None]
    paths = [all_paths[i] for i in arrays]
    leaves = [tree.unbox(all_leaves[i]) for i in arrays]
    all_layouts = layouts.layouts(paths, [tuple(leaf.shape) for leaf in leaves])
    if targets is None or callable(targets) or is_table(targets):
        by_path = dict(zip(paths, leaves, strict=True))
        requested = _requested(targets, by_path, all_layouts, rank)
    else:
        entries = entries_of_tree(targets, treedef, all_paths)
        requested = [entries[i] for i in arrays]
    plans = {
        i: _plan_leaf(path, leaf, target, layout, rank, side)
        for i, path, leaf, target, layout in zip(
            arrays, paths, leaves, requested, all_layouts, strict=True
        )
    }
    plan = Plan([plans.get(i, LeafPlan(path, (), "")) for i, path in enumerate(all_paths)])
    if not any(leaf.is_target for leaf in plan.leaves):
        _report_nothing_projected(targets, paths)
    return plan


def _report_nothing_projected(targets: Targets, paths: Sequence[str]) -> None:
    shown = ", ".join(map(repr, paths[:4])) + (", ..." if len(paths) > 4 else "")
    if targets is None:
        warnings.warn(
            "lowrank_optax: no leaf is projected; the default rule takes matrices of linear "
            f"layers whose smaller side is larger than the rank, and these leaves are: {shown}. "
            "Lower the rank or pass targets",
            stacklevel=5,
        )
    else:
        raise ValueError(
            f"targets matches no matrix among the {len(paths)} leaves: {shown}. A regex is "
            "searched in the whole path, e.g. targets=[('mlp', 32)]; lro.describe(tx, params) "
            "shows every path"
        )
