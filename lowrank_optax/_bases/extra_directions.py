"""Extra random directions of one step, beside each basis: drawn anew, never stored.

How many there are and from which seed is static. It travels in a lift's state as a pytree node
without leaves, so that a backward pass that sees only the optimizer's state draws the very
directions that the update will use.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import orthogonal_to, whiten
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._arrays.static import register_static
from lowrank_optax._bases import find
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import BOTH, Bases, View

# Numbers 0 and 1 below a target's key are those of its bases, which extra directions must not
# repeat.
_KEY = 2


@dataclasses.dataclass(frozen=True)
class ExtraDirections:
    """How extra directions are drawn.

    Attributes:
        extra: directions of each target, an int; or a float, as a multiple of its rank.
        seed: seed of the draws.
    """

    extra: int | float
    seed: int

    def columns(self, projection: Projection) -> int:
        """How many directions one target gets: no more than its basis leaves free."""
        size = projection.view.length(projection.sides[0])
        integer = isinstance(self.extra, int | np.integer)
        wanted = int(self.extra) if integer else max(1, round(self.extra * projection.rank))
        return min(wanted, size - projection.rank)

    def draw(
        self, projections: Sequence[Projection], bases: Sequence[Bases], count: Array
    ) -> list[Bases]:
        """The directions of some targets at one step.

        Args:
            projections: the targets, each with its number in the plan.
            bases: their current bases, which the directions are orthogonal to.
            count: int32 scalar, updates so far.

        Returns:
            For each target orthonormal columns on the side that has the basis.
        """
        calls = []
        for projection, basis in zip(projections, bases, strict=True):
            key = find.leaf_key(self.seed, count, projection.number)
            static = (projection.view, projection.sides[0], self.columns(projection))
            calls.append((static, (basis.only(), jax.random.fold_in(key, _KEY))))
        drawn = map_sharing(_draw, calls)
        return [Bases.of(p.sides[0], q) for p, q in zip(projections, drawn, strict=True)]


register_static(ExtraDirections)


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


def check_one_sided(name: str, projections: Sequence[Projection]) -> None:
    """Raises ValueError at the first target that has bases on both sides."""
    for projection in projections:
        if projection.sides == BOTH:
            raise ValueError(
                f"{projection.path!r}: {name} draws extra directions on the one side that has a "
                'basis, but this target has bases on both; use another side than "both", or '
                "another lift"
            )
