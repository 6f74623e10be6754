"""What every tracker does: check its arguments, start its bases, keep its clock."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import rebox_part, unbox
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import explicit_spec
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import check_static
from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases

Every = int | Callable[[jax.Array], Any]

NEVER = np.iinfo(np.int32).max


def check_every(name: str, every: Any, hint: str) -> None:
    """Raises unless ``every`` is a positive int or a schedule; ``name`` is the tracker's."""
    check_static(f"{name}: every", every)
    if callable(every):
        return
    if isinstance(every, bool) or not isinstance(every, int | np.integer):
        raise TypeError(f"{name}: every must be an int or a schedule of the step, got {every!r}")
    if every < 1:
        raise ValueError(f"{name}: every={every} must be at least 1 step; {hint}")


def random_start(plan: Plan, seed: int, dtype: jnp.dtype) -> list[Bases]:
    """Seeded random bases, one entry a target."""
    # Compiled once per shape: an eager run would dispatch every small operation of each leaf.
    make = jax.jit(find.random_basis, static_argnums=(1, 2, 3, 4))
    start = []
    for number, index in enumerate(plan.targets):
        leaf = plan.leaves[index]
        # Step -1, so that the start differs from what step 0 draws.
        key = find.leaf_key(seed, np.uint32(NEVER), number)
        assert leaf.view is not None
        sides = {
            side: make(key, leaf.view, side, leaf.rank, wide_dtype(dtype)) for side in leaf.sides
        }
        stored = {side: storage.store(basis, leaf.view, dtype) for side, basis in sides.items()}
        start.append(Bases(**stored))
    return start


def basis_trees(plan: Plan, params: Any, bases: Sequence[Bases]) -> tuple[Any, Any]:
    """Two trees parallel to params, with the reduction and the output bases at targets."""
    boxes, treedef = tree.flatten(params)
    trees = []
    for side in (REDUCTION, OUTPUT):
        leaves: list[Any] = [None] * len(plan.leaves)
        for index, basis in zip(plan.targets, bases, strict=True):
            view, one = plan.leaves[index].view, getattr(basis, side)
            if view is not None and one is not None:
                like = boxes[index]
                placed = view.place_basis(one, side, unbox(like), spreading=True)
                axes, spec = view.basis_axes(side), explicit_spec(placed)
                leaves[index] = rebox_part(like, placed, axes, spec)
        trees.append(tree.sparse_tree(treedef, leaves))
    return trees[0], trees[1]


def with_bases(plan: Plan, reduction: Any, output: Any, bases: Sequence[Bases]) -> tuple[Any, Any]:
    """The two trees with the bases of each target replaced."""
    paths = [plan.leaves[index].path for index in plan.targets]
    return (
        tree.with_leaves(reduction, {p: b.reduction for p, b in zip(paths, bases, strict=True)}),
        tree.with_leaves(output, {p: b.output for p, b in zip(paths, bases, strict=True)}),
    )


def start_state(plan: Plan, params: Any, bases: Sequence[Bases]) -> TrackerState:
    """The state of a tracker before its first update."""
    if plan.leaves:
        reduction_basis, output_basis = basis_trees(plan, params, bases)
    else:
        # An empty tree, or the placeholder of optax.tree_utils.tree_map_params.
        reduction_basis = output_basis = params
    counters = max(1, len(plan.targets))
    return TrackerState(
        plan=plan,
        tracker_count=jnp.zeros([], jnp.int32),
        next_refresh=jnp.zeros(counters, jnp.int32),
        refreshes=jnp.zeros(counters, jnp.int32),
        reduction_basis=reduction_basis,
        output_basis=output_basis,
    )


def interval(every: Every, count: jax.Array) -> jax.Array:
    """The steps between two changes of a basis, as of a step: int32, at least 1."""
    return jnp.maximum(jnp.asarray(every(count) if callable(every) else every, jnp.int32), 1)
