"""Extra random directions of one step, beside each basis: drawn anew, never stored.

A sketch is static: how many directions, and the seed. It travels in a lift's state as a pytree
node without leaves, so that a backward pass that sees only the optimizer's state draws the
very directions that the update will use.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import orthogonal_to, whiten
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._arrays.static import register_static
from lowrank_optax._arrays.tree import find_states
from lowrank_optax._bases import find
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View

# Numbers 0 and 1 below a target's key are those of its bases, which a sketch must not repeat.
_SKETCH = 2


@dataclasses.dataclass(frozen=True)
class Sketch:
    """How extra directions are drawn.

    Attributes:
        extra: directions of each target, an int; or a float, as a multiple of its rank.
        seed: seed of the draws.
    """

    extra: int | float
    seed: int

    def columns(self, leaf: LeafPlan) -> int:
        """How many directions one target gets: no more than its basis leaves free."""
        assert leaf.view is not None
        size = leaf.view.rows if leaf.sides == (REDUCTION,) else leaf.view.columns
        integer = isinstance(self.extra, int | np.integer)
        wanted = int(self.extra) if integer else max(1, round(self.extra * leaf.rank))
        return min(wanted, size - leaf.rank)

    def draw(
        self, targets: Sequence[tuple[int, LeafPlan]], bases: Sequence[Bases], count: Any
    ) -> list[Bases]:
        """The directions of some targets at one step.

        Args:
            targets: the number of each target in its plan, and its leaf.
            bases: their current bases, which the directions are orthogonal to.
            count: int32 scalar, updates so far.

        Returns:
            For each target orthonormal columns on the side that has the basis.
        """
        calls = []
        for (number, leaf), basis in zip(targets, bases, strict=True):
            key = find.leaf_key(self.seed, count, number)
            static = (leaf.view, leaf.sides[0], self.columns(leaf))
            here = getattr(basis, leaf.sides[0])
            calls.append((static, (here, jax.random.fold_in(key, _SKETCH))))
        drawn = map_sharing(_draw, calls)
        return [
            Bases(reduction=q) if leaf.sides == (REDUCTION,) else Bases(output=q)
            for (_, leaf), q in zip(targets, drawn, strict=True)
        ]


register_static(Sketch)


def _draw(
    static: tuple[View, str, int], basis: Float[Array, "*rows r"], key: Array
) -> Float[Array, "*rows k"]:
    view, side, columns = static
    basis = basis.astype(wide_dtype(basis))
    batch_ndim = len(view.batch_axes)
    start = find.random_directions(key, view, side, columns, basis.dtype)
    start = orthogonal_to(basis, place_like(start, basis), batch_ndim)
    # Gaussian columns are well conditioned: two passes do where a gradient's may need four.
    return whiten(whiten(start, batch_ndim), batch_ndim, well_conditioned=True)


def check_one_sided(name: str, leaves: Sequence[LeafPlan]) -> None:
    """Raises ValueError at the first target that has bases on both sides."""
    for leaf in leaves:
        if leaf.sides == (REDUCTION, OUTPUT):
            raise ValueError(
                f"{leaf.path!r}: {name} draws extra directions on the one side that has a basis, "
                'but this target has bases on both; use another side than "both", or another lift'
            )


def sketched_products(
    lift_state: Any,
    plan: Plan,
    bases: Sequence[Bases],
    gradients: Sequence[Any],
    count: Any,
    given: Any,
) -> list[tuple[Bases | None, Array | None]]:
    """This step's extra directions and the gradient's products with them.

    Args:
        lift_state: the lift's state, which holds a sketch or none.
        plan: what is projected.
        bases: the current bases of each target.
        gradients: every leaf's gradient, leaf-shaped or compact.
        count: int32 scalar, updates so far.
        given: the bases that came beside compact gradients, or None.

    Returns:
        A pair for each target; both None where there is no sketch.
    """
    found: list[tuple[Bases | None, Array | None]] = [(None, None)] * len(plan.targets)
    for sketch in find_states(lift_state, Sketch):
        full = []
        for number, index in enumerate(plan.targets):
            leaf = plan.leaves[index]
            if isinstance(gradients[index], Compact):
                extra = gradients[index].extra
                _check_extra(sketch, leaf, extra)
                found[number] = given.directions[leaf.path], extra
            else:
                full.append((number, leaf))
        drawn = sketch.draw(full, [bases[number] for number, _ in full], count)
        for (number, leaf), directions in zip(full, drawn, strict=True):
            assert leaf.view is not None
            gradient = gradients[plan.targets[number]]
            found[number] = directions, leaf.view.project(gradient, directions)
    return found


def _check_extra(sketch: Sketch, leaf: LeafPlan, extra: Any) -> None:
    assert leaf.view is not None
    expected, got = leaf.view.core_shape(leaf.sides, sketch.columns(leaf)), None
    if extra is not None:
        got = extra.shape
    if got != expected:
        raise ValueError(
            f"{leaf.path!r}: the lift reads the gradient in extra directions, products of shape "
            f"{expected}, but this compact gradient has {got}; compute gradients with the "
            "opt_state that you update"
        )
