"""The state of a subspace optimizer."""

from typing import Any, NamedTuple


class SubspaceState(NamedTuple):
    """State of a subspace optimizer.

    Attributes:
        tracker_state: the tracker's state, with the plan and the bases.
        inner_state: the inner optimizer's state, on cores; None for a filter.
        lift_state: the lift's state.
        fidelity: vectors of metrics, one entry a target; None without ``metrics``.
    """

    tracker_state: Any
    inner_state: Any
    lift_state: Any
    fidelity: Any
