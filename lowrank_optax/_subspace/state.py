"""The state of a subspace optimizer."""

from typing import NamedTuple

import jax
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import Leaf
from lowrank_optax._arrays.tree import OptState, PyTree
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner.sites import mirrors, sites


class SubspaceState(NamedTuple):
    """State of a subspace optimizer.

    Attributes:
        tracker_state: the tracker's state, with the plan and the bases.
        inner_state: the inner optimizer's state, on cores; None for a filter.
        lift_state: the lift's state.
        fidelity: vectors of metrics, one entry a target; None without ``metrics``.
    """

    tracker_state: PyTree
    inner_state: OptState
    lift_state: OptState
    fidelity: PyTree

    def on_cores(self) -> dict[str, list[Leaf]]:
        """By path what the inner optimizer keeps of the shape of each target's core."""
        found: dict[str, list[Leaf]] = {}
        for tracker in tree.find_states(self.tracker_state, TrackerState):
            shapes = {p.path: p.core_shape for p in tracker.plan.projections}
            found |= {path: [] for path in shapes}
            # Its trees of bases have a place for every leaf of params.
            like = jax.tree.map(lambda _: 0, tracker.reduction_basis, is_leaf=_is_place)
            for site in sites(self.inner_state, mirrors(self.inner_state, like)):
                if site.weight is not None and shapes.get(site.weight) == site.value.shape:
                    found[site.weight].append(site.value)
        return found


def _is_place(x: object) -> bool:
    return isinstance(x, optax.MaskedNode) or tree.is_leaf(x)
