"""What is projected and how, for every leaf of one params tree.

A plan is static: it is made once, at ``init``, and travels in the optimizer state as a
pytree node without leaves. So whoever holds a state, through any wrapper, knows the views,
sides and ranks behind its arrays, and a square leaf can never change sides.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lowrank_optax._arrays.static import register_static
from lowrank_optax._plan.view import View


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


register_static(Plan)
