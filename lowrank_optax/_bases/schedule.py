"""When bases change: the clock of a tracker.

Each target has a step at which it is next due. That step stands in the state, so a backward pass
which sees nothing but the state knows what is due; and a target whose gradient could not be used
simply stays due, without moving the grid of those that could.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lowrank_optax._arrays.orthonormal import gram
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import check_static
from lowrank_optax._plan.view import Bases, View

Every = int | Callable[[jax.Array], Any]

NEVER = np.iinfo(np.int32).max


def check_every(name: str, every: object, hint: str) -> None:
    """Raises unless ``every`` is a positive int or a schedule; ``name`` is the tracker's."""
    check_static(f"{name}: every", every)
    if callable(every):
        return
    if isinstance(every, bool) or not isinstance(every, int | np.integer):
        raise TypeError(f"{name}: every must be an int or a schedule of the step, got {every!r}")
    if every < 1:
        raise ValueError(f"{name}: every={every} must be at least 1 step; {hint}")


class Counters(NamedTuple):
    """When each target is due, one entry a target.

    Attributes:
        next_refresh: the step at which it is due.
        refreshes: how often its bases were replaced.
        intervals: its present interval where that adapts, else None.
    """

    next_refresh: Int[Array, "targets"]
    refreshes: Int[Array, "targets"]
    intervals: Int[Array, "targets"] | None

    @classmethod
    def of(cls, state: TrackerState) -> "Counters":
        """The counters in a tracker's state."""
        return cls(state.next_refresh, state.refreshes, state.intervals)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When the bases of each target change.

    Attributes:
        every: steps between two changes, an int or a schedule of the step.
        stagger: whether the targets' changes are spread over the interval.
        adaptive: what decides each target's own interval in place of ``every``, or None.
        once: whether bases stay for good once they are found.
        always: whether every target is due at every step, whatever its state says, so that no
            branch is needed.
    """

    every: Every
    stagger: bool = False
    adaptive: "AdaptiveEvery | None" = None
    once: bool = False
    always: bool = False

    def started(self, state: TrackerState) -> TrackerState:
        """A tracker's first state with the counters that this schedule keeps beside the others."""
        if self.adaptive is None:
            return state
        return state._replace(intervals=jnp.full_like(state.refreshes, self.adaptive.initial))

    def after(
        self,
        count: Int[Array, ""],
        done: Bool[Array, "targets"],
        counters: Counters,
        overlaps: Float[Array, "targets"] | None,
    ) -> Counters:
        """The counters after some targets got new bases.

        Args:
            count: the step.
            done: which targets.
            counters: the counters before.
            overlaps: of the new bases with the old, where intervals adapt.
        """
        next_refresh, refreshes, intervals = counters
        first = refreshes == 0
        if self.adaptive is not None and intervals is not None and overlaps is not None:
            intervals = jnp.where(
                done, self.adaptive.following(intervals, overlaps, first), intervals
            )
        following = self._following(count, len(done), intervals, first)
        return Counters(
            jnp.where(done, following, next_refresh), refreshes + done.astype(jnp.int32), intervals
        )

    def _following(
        self, count: Array, targets: int, intervals: Array | None, first: Array
    ) -> Array:
        """The step at which each target is due again, if it changes at ``count``."""
        if self.once:
            return jnp.full(targets, NEVER, jnp.int32)
        every = self.every(count) if callable(self.every) else self.every
        period = jnp.maximum(jnp.asarray(every, jnp.int32), 1)
        offsets = jnp.zeros(targets, jnp.int32)
        if self.stagger:
            # Target i of n waits for i * period // n steps; in parts, lest the product overflow.
            number = jnp.arange(targets, dtype=jnp.int32)
            offsets = period // targets * number + period % targets * number // targets
        if intervals is not None:
            return count + intervals + jnp.where(first, offsets, 0)
        # A refresh that had to be retried does not move the grid.
        return count + period - (count - offsets) % period


@dataclasses.dataclass(frozen=True)
class AdaptiveEvery:
    """What :func:`adaptive_every` returns.

    Attributes:
        initial: the first and the shortest interval, in steps.
        limit: the longest.
        growth: by what an interval changes at a refresh.
        overlap: the overlap from which on it grows.
    """

    initial: int
    limit: int
    growth: float
    overlap: float

    def following(
        self, interval: Int[Array, "targets"], overlap: Float[Array, "targets"], first: Array
    ) -> Int[Array, "targets"]:
        """The interval after a refresh that found ``overlap`` with the basis before."""
        grown = jnp.minimum(interval.astype(jnp.float32) * self.growth, self.limit)
        shrunk = jnp.maximum(interval.astype(jnp.float32) / self.growth, self.initial)
        new = jnp.where(overlap >= self.overlap, grown, shrunk)
        # The first basis has none before it but a random one.
        return jnp.where(first, self.initial, jnp.round(new)).astype(jnp.int32)


def adaptive_every(
    initial: int = 50, limit: int = 1000, *, growth: float = 2.0, overlap: float = 0.5
) -> AdaptiveEvery:
    r"""Refreshes each basis more rarely while its subspace hardly moves.

    Given to :func:`refresh_basis` as ``every``. At each refresh, per target,

    .. math:: o = \|P_{new}^T P_{old}\|_F^2 / r, \qquad
              T \leftarrow \begin{cases} \min(\mathrm{growth}\cdot T, \mathrm{limit}) & o \ge
              \mathrm{overlap} \\ \max(T / \mathrm{growth}, \mathrm{initial}) & \text{else}
              \end{cases}

    o is 1 for the same subspace, r/m on average for a random one, and does not depend on the signs
    or on the order of the columns. :func:`metrics` counts the refreshes.

    Args:
        initial: first and shortest interval, in steps.
        limit: longest interval.
        growth: factor between one interval and the next, above 1.
        overlap: the overlap in (0, 1] from which on the interval grows.

    Returns:
        What ``refresh_basis(every=...)`` and ``galore_adamw(refresh_every=...)`` take.

    Raises:
        TypeError: if ``initial`` or ``limit`` is no int.
        ValueError: if a value is out of range.

    Example:
        >>> import lowrank_optax as lro
        >>> tracker = lro.refresh_basis(rank=32, every=lro.adaptive_every(initial=50, limit=800))
    """
    for name, value in (("initial", initial), ("limit", limit)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"adaptive_every: {name} must be an int of steps, got {value!r}")
    if not 1 <= initial <= limit:
        raise ValueError(
            f"adaptive_every: initial={initial} and limit={limit} must be 1 <= initial <= limit"
        )
    if not growth > 1:
        raise ValueError(f"adaptive_every: growth={growth} must be above 1")
    if not 0 < overlap <= 1:
        raise ValueError(f"adaptive_every: overlap={overlap} must be in (0, 1]")
    return AdaptiveEvery(int(initial), int(limit), float(growth), float(overlap))


def subspace_overlap(view: View, new: Bases, old: Bases) -> Float[Array, ""]:
    """``‖P_newᵀP_old‖² / r``, averaged over the matrices of a batch and over both sides."""
    shares = [
        jnp.mean(jnp.sum(jnp.square(gram(p, q, len(view.batch_axes))), axis=(-2, -1))) / p.shape[-1]
        for p, q in zip(new, old, strict=True)
        if p is not None and q is not None
    ]
    return jnp.mean(jnp.stack(shares))
