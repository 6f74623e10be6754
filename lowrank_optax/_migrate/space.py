"""The coordinates that arrays of an optimizer state are in."""

from typing import Any, NamedTuple

import jax
import optax

from lowrank_optax._arrays.tree import PyTree, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner.sites import Site, mirrors, sites
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import Bases
from lowrank_optax._subspace.state import SubspaceState


class Space(NamedTuple):
    """The coordinates that an array is in: those of a target's bases, or the leaf's own.

    Attributes:
        projection: the target; None where the array is in the weight's own shape.
        bases: its bases.
    """

    projection: Projection | None = None
    bases: Bases = Bases()

    @property
    def rank(self) -> int:
        """The rank of the bases, 0 where the array is in the weight's own shape."""
        return 0 if self.projection is None else self.projection.rank

    @property
    def form(self) -> Projection | None:
        """The target without its name, so that weights that look alike share a computation."""
        return None if self.projection is None else self.projection.form

    def is_nested(self, new: "Space") -> bool:
        """Whether ``new`` shares coordinates with this space, by how bases are carried.

        The first ``min(r, r')`` columns of the two bases then are the same.
        """
        old = self.projection
        if old is None or new.projection is None:
            return old is new.projection
        return (old.view, old.sides) == (new.projection.view, new.projection.sides)


class Place(NamedTuple):
    """One array of an optimizer state, with the coordinates that it is in.

    Attributes:
        site: whose array it is.
        space: its coordinates.
    """

    site: Site
    space: Space

    @property
    def value(self) -> Any:
        """The array."""
        return self.site.value

    @property
    def path(self) -> str:
        """The path below its field; the weight's where it belongs to one."""
        return self.site.path

    @property
    def kind(self) -> tuple[str, str, str]:
        """What two states' arrays of one meaning share."""
        return type(self.site.owner).__name__, self.site.field, self.path

    @property
    def in_tracker(self) -> bool:
        """Whether it is part of a tracker's own state."""
        return isinstance(self.site.owner, TrackerState)


def places(state: PyTree, params: PyTree, tx: optax.GradientTransformation) -> list[Place]:
    """Every array of an optimizer state, in the order of its leaves.

    Args:
        state: an optimizer state, through any wrapper.
        params: the params that it was made for.
        tx: the optimizer that made it.
    """
    known: dict[int, dict[str, Space]] = {}

    def space(site: Site) -> Space:
        for node, field in site.trail:
            if isinstance(node, SubspaceState) and field == "inner_state":
                if id(node) not in known:
                    known[id(node)] = _spaces(node)
                return known[id(node)].get(site.weight or "", Space())
        return Space()

    return [Place(site, space(site)) for site in sites(state, mirrors(state, params, tx))]


def _spaces(node: SubspaceState) -> dict[str, Space]:
    return {
        projection.path: Space(projection, bases)
        for tracker in find_states(node.tracker_state, TrackerState)
        for projection, bases in zip(tracker.plan.projections, tracker.encoders(), strict=True)
    }


def shape_in(space: Space, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a weight of shape ``whole`` has in a space."""
    return whole if space.projection is None else space.projection.core_shape


def lifted(space: Space, array: jax.Array) -> jax.Array:
    """An array in the weight's own shape."""
    return array if space.projection is None else space.projection.view.lift(array, space.bases)
