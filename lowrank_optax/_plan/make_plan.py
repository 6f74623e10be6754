"""Deciding for every leaf of a params tree whether and how it is projected."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.static import register_with_flax
from lowrank_optax._arrays.tree import Params
from lowrank_optax._checks import Rank, check_rank
from lowrank_optax._plan import layouts
from lowrank_optax._plan.layouts import Kind
from lowrank_optax._plan.plan import LeafPlan, Plan, PlanOfAnything, Tracking
from lowrank_optax._plan.target import (
    ByDefault,
    Table,
    Target,
    Targets,
    as_target,
    entries_of_tree,
    is_table,
)
from lowrank_optax._plan.view import OUTPUT, REDUCTION, View, make_view


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


def make_plan(
    params: Params, targets: Targets, rank: Rank, side: str, tracking: Tracking | None = None
) -> Plan:
    """Decides for every leaf of ``params`` whether and how it is projected.

    Args:
        params: a params tree; arrays, ``jax.ShapeDtypeStruct``s, boxed variables or None.
        targets: None for the default rule, a list of ``(regex, entry)``, a pytree of
            entries, or a callable ``(path, leaf) -> entry``.
        rank: the rank of targets that name none.
        side: the side of targets that name none.
        tracking: the static facts of the tracker that asks.

    Returns:
        The plan.

    Raises:
        ValueError: if ``targets`` matches no leaf, or an entry does not fit its leaf.
    """
    register_with_flax()
    all_paths, all_leaves, treedef = tree.flatten_with_paths(params)
    if not all_leaves:
        return (
            PlanOfAnything() if tree.stands_for_params(params) else Plan((), tracking or Tracking())
        )
    if len(set(all_paths)) != len(all_paths):
        twice = next(path for path in all_paths if all_paths.count(path) > 1)
        raise ValueError(f"two leaves of params are both called {twice!r}; rename one of them")
    arrays = [i for i, leaf in enumerate(all_leaves) if leaf is not None]
    paths = [all_paths[i] for i in arrays]
    leaves = [unbox(all_leaves[i]) for i in arrays]
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
    planned = tuple(plans.get(i, LeafPlan(path, (), "")) for i, path in enumerate(all_paths))
    if not any(leaf.is_target for leaf in planned):
        _report_nothing_projected(targets, paths)
    return Plan(planned, tracking or Tracking())


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
