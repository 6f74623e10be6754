"""Trees of cores: a target's core takes the place of its leaf, and lies where the state does.

The inner optimizer keeps cores spread over all mesh axes of their leaf, and in a box of their own
where the leaf is boxed; products use them on the axes of their own side.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowrank_optax._arrays.boxes import Leaf, MaybeBox, rebox_part, unbox
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import explicit_spec
from lowrank_optax._arrays.tree import PyTree, flatten, unflatten
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import Bases


def zero_cores(tracker: TrackerState, params: PyTree) -> PyTree:
    """A tree like params with a zero core at each target, for the inner optimizer's init."""
    zeros = [
        jnp.zeros(projection.core_shape, wide_dtype(*(b for b in bases if b is not None)))
        for projection, bases in zip(tracker.plan.projections, tracker.encoders(), strict=True)
    ]
    return with_cores(params, tracker.plan.projections, zeros, flatten(params)[0])


def with_cores(
    tree: PyTree,
    projections: Sequence[Projection],
    cores: Sequence[jax.Array],
    like: Sequence[MaybeBox],
) -> PyTree:
    """A tree with cores, as the inner optimizer keeps them, in the place of targets.

    Args:
        tree: gradients or params.
        projections: the targets.
        cores: their cores.
        like: every leaf of params, boxed or not; of updates if there are no params.

    Returns:
        The tree; each core is spread over devices, and in a box whose axis names are its own where
        its leaf is boxed.
    """
    leaves, treedef = flatten(tree)
    for projection, core in zip(projections, cores, strict=True):
        view, sides, box = projection.view, projection.sides, like[projection.index]
        core = view.place_core(core, sides, unbox(box), spreading=True)
        boxed = rebox_part(box, core, view.core_leaf_axes(sides), explicit_spec(core))
        leaves[projection.index] = boxed
    return unflatten(treedef, leaves)


def gathered(projection: Projection, bases: Bases, like: jax.Array) -> Bases:
    """Bases where they are used, on their own side's mesh axes only: thin, so cheap to move."""
    sides = {
        side: projection.view.place_basis(basis, side, like)
        for side, basis in zip(Bases._fields, bases, strict=True)
        if basis is not None
    }
    return Bases(**sides)


def arrays(tree: PyTree) -> list[Leaf]:
    """The leaves of a tree without their boxes."""
    return [unbox(leaf) for leaf in flatten(tree)[0]]
