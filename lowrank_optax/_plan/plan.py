"""What is projected and how, for every leaf of one params tree.

A plan is static: it is made once, at ``init``, and travels in the optimizer state as a
pytree node without leaves. So whoever holds a state, through any wrapper, knows the views,
sides and ranks behind its arrays, and a square leaf can never change sides.
"""

import dataclasses
import functools
from collections.abc import Sequence

from lowrank_optax._arrays.static import register_static
from lowrank_optax._plan.view import View


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What happens to one leaf, projected or not.

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
    def is_target(self) -> bool:
        """Whether the leaf is a target; its subspace may be the whole space (P = I)."""
        return self.view is not None


@dataclasses.dataclass(frozen=True)
class Projection:
    """A leaf that has bases.

    Attributes:
        number: its number among the leaves that have bases.
        index: its number among all leaves of params.
        path: its name.
        dtype: the parameter's dtype, by name.
        view: how it is read as matrices.
        sides: the sides that have a basis.
        rank: columns of each basis.
    """

    number: int
    index: int
    path: str
    dtype: str
    view: View
    sides: tuple[str, ...]
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.view.shape

    @property
    def core_shape(self) -> tuple[int, ...]:
        """The shape that the inner optimizer sees."""
        return self.view.core_shape(self.sides, self.rank)

    @property
    def form(self) -> "Projection":
        """What leaves that look alike share, for computations that are compiled once for all."""
        return dataclasses.replace(self, number=0, index=0, path="", dtype="")


@dataclasses.dataclass(frozen=True)
class Tracking:
    """What is static of how a tracker follows the gradient.

    Attributes:
        seed: the seed of its random draws.
        iterates: whether a new basis comes out of subspace iteration, from products of the
            gradient alone.
        needs_gradient: what of the tracker needs gradients in full, for messages, with what to
            use instead; empty if nothing does.
        frozen: whether a basis that has been found stays for good.
    """

    seed: int = 0
    iterates: bool = False
    needs_gradient: str = ""
    frozen: bool = False

    @property
    def reads_gradient(self) -> bool:
        """Whether new bases depend on the gradient at all."""
        return self.iterates or bool(self.needs_gradient)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plans of all leaves of a params tree, in its order.

    Attributes:
        leaves: one :class:`LeafPlan` a leaf.
        tracking: the static facts of the tracker that follows it.
    """

    leaves: tuple[LeafPlan, ...] = ()
    tracking: Tracking = Tracking()

    @functools.cached_property
    def projections(self) -> tuple[Projection, ...]:
        """The leaves that have bases, in order."""
        found: list[Projection] = []
        for index, leaf in enumerate(self.leaves):
            if leaf.view is not None and leaf.sides:
                facts = (leaf.path, leaf.dtype, leaf.view, leaf.sides, leaf.rank)
                found.append(Projection(len(found), index, *facts))
        return tuple(found)

    # JAX hashes the structure of its arguments at every call of a compiled function.
    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.tracking))

    def __hash__(self) -> int:
        return self._hash

    # What is cached stays behind: hashes of strings differ between processes.
    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.leaves, self.tracking)

    def __repr__(self) -> str:
        return f"Plan({len(self.projections)} of {len(self.leaves)} leaves projected)"

    def check_count(self, leaves: Sequence[object], what: str) -> None:
        """Raises ValueError unless there is one entry for each leaf of the plan."""
        if len(leaves) != len(self.leaves):
            raise ValueError(
                f"{what} has {len(leaves)} leaves, but the optimizer state was made for "
                f"params with {len(self.leaves)}; call init on the params that you update"
            )


register_static(Plan)


class PlanOfAnything(Plan):
    """The plan of a placeholder that stands for any params tree.

    ``optax.tree_utils.tree_map_params`` asks a transformation for the state of such a placeholder
    and lays it over a real state. This plan is no pytree node but a leaf, one that belongs to no
    parameter: so what it lies over, the real plan, is passed through as a whole.
    """
