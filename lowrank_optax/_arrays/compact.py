"""A gradient of which only a core exists: what a compact backward pass leaves of one."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compact:
    """A compact gradient: what the backward pass left of one target's gradient.

    It stands in a tree of gradients where the leaf-shaped array would, and is a pytree node, so
    norms, clipping and sums over micro-batches act on its arrays.

    Attributes:
        core: the gradient in the subspace, ``PᵀG``, ``GQ`` or ``PᵀGQ``.
        extra: the products with extra directions that were asked for, or None.
    """

    # JAX puts placeholders in the place of arrays.
    core: Any
    extra: Any = None
