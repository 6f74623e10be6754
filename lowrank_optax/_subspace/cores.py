"""Trees of cores: from leaf-shaped gradients and params, and where they lie.

Each target's core takes the place of its leaf. The inner optimizer keeps cores spread over all mesh
axes of their leaf, and in a box of their own where the leaf is boxed; products use them on the axes
of their own side.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_optax._arrays.boxes import rebox_part, unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import explicit_spec
from lowrank_optax._arrays.tree import flatten, unflatten
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.view import Bases
from lowrank_optax._subspace.nonlinearity import Nonlinearity


def zero_cores(plan: Plan, tracker: TrackerState, params: Any) -> Any:
    """A tree like params with a zero core at each target, for the inner optimizer's init."""
    leaves, treedef = flatten(params)
    for index, basis in zip(plan.targets, tracker.encoders(), strict=True):
        some = next(b for b in basis if b is not None)
        leaf = plan.leaves[index]
        assert leaf.view is not None
        zeros = jnp.zeros(leaf.core_shape, wide_dtype(some))
        leaves[index] = stored(leaf, zeros, leaves[index])
    return unflatten(treedef, leaves)


def stored(leaf: LeafPlan, core: jax.Array, like: Any) -> Any:
    """A core as the inner optimizer keeps it: spread over devices, and boxed as its leaf is.

    Args:
        leaf: the plan of the target.
        core: the core.
        like: the target's leaf of params or updates.

    Returns:
        The core, in a box whose axis names are its own where ``like`` is boxed.
    """
    assert leaf.view is not None
    core = leaf.view.place_core(core, leaf.sides, unbox(like), spreading=True)
    return rebox_part(like, core, leaf.view.core_leaf_axes(leaf.sides), explicit_spec(core))


def store(plan: Plan, cores: Any, like: list[Any]) -> Any:
    """A tree of cores as the inner optimizer keeps them."""
    leaves, treedef = flatten(cores)
    for index in plan.targets:
        leaves[index] = stored(plan.leaves[index], leaves[index], like[index])
    return unflatten(treedef, leaves)


def gathered(leaf: LeafPlan, basis: Bases, like: Any) -> Bases:
    """Bases where they are used, on their own side's mesh axes only: thin, and so cheap to move."""
    assert leaf.view is not None
    sides = {
        side: leaf.view.place_basis(getattr(basis, side), side, unbox(like)) for side in leaf.sides
    }
    return Bases(**sides)


def all_gathered(plan: Plan, bases: list[Bases], like: list[Any]) -> list[Bases]:
    pairs = zip(plan.targets, bases, strict=True)
    return [gathered(plan.leaves[index], basis, like[index]) for index, basis in pairs]


def _core(leaf: LeafPlan, basis: Bases, array: Any) -> jax.Array:
    """The core of one target: projected, or as the backward pass made it."""
    assert leaf.view is not None
    if not isinstance(array, Compact):
        return leaf.view.project(array, basis)
    if array.core.shape != leaf.core_shape:
        raise ValueError(
            f"{leaf.path!r}: got a compact gradient of shape {array.core.shape}, expected "
            f"{leaf.core_shape}; compute gradients with the opt_state that you update"
        )
    return array.core


def encode(plan: Plan, bases: list[Bases], tree: Any) -> Any:
    """A tree like ``tree`` with the core of each target in its place."""
    leaves, treedef = flatten(tree)
    plan.check_count(leaves, "updates or params")
    for index, basis in zip(plan.targets, bases, strict=True):
        leaves[index] = _core(plan.leaves[index], basis, unbox(leaves[index]))
    return unflatten(treedef, leaves)


def bend(plan: Plan, nonlinearity: Nonlinearity, gradients: list[Any], cores: Any) -> Any:
    """The tree of cores with the nonlinearity applied to that of each target."""
    leaves, treedef = flatten(cores)
    for index in plan.targets:
        leaf, gradient = plan.leaves[index], gradients[index]
        assert leaf.view is not None
        if isinstance(gradient, Compact):
            if nonlinearity.needs_gradient:
                raise ValueError(
                    f"{leaf.path!r}: nonlinearity={nonlinearity.name!r} needs the full gradient, "
                    "got a compact one; use jax.value_and_grad in place of "
                    "compact_value_and_grad, or another nonlinearity"
                )
            gradient = None
        leaves[index] = nonlinearity.apply(leaf.view, leaf.sides, leaves[index], gradient)
    return unflatten(treedef, leaves)


def arrays(tree: Any) -> list[Any]:
    return [unbox(leaf) for leaf in flatten(tree)[0]]
