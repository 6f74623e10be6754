"""When to give a target a larger rank while training: ``RankGrowth``."""

import collections
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowrank_optax._arrays.tree import OptState, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import check_rank
from lowrank_optax._plan.plan import Projection
from lowrank_optax._ranks import rules
from lowrank_optax._subspace.state import SubspaceState


def _batched(basis: Any, projection: Projection) -> np.ndarray:
    """A basis as ``(batch, side, r)`` in float64."""
    return np.asarray(basis, np.float64).reshape(
        math.prod(projection.view.batch_shape), -1, basis.shape[-1]
    )


def principal_angle(new: np.ndarray, old: np.ndarray) -> float:
    """The angle between two subspaces, in degrees: of the mean squared cosine.

    Args:
        new: orthonormal columns ``(batch, side, r)``.
        old: likewise, of any rank.

    Returns:
        ``arccos sqrt(‖newᵀ old‖² / min(r, r'))``, which is 0 if one contains the other and
        does not depend on the signs or the order of the columns.
    """
    cosines = np.swapaxes(new, -1, -2) @ old
    shared = min(new.shape[-1], old.shape[-1]) * new.shape[0]
    return math.degrees(math.acos(min(1.0, math.sqrt(np.sum(cosines**2) / shared))))


class RankGrowth:
    r"""Proposes larger ranks for targets whose subspace has become too small.

    A target is due when the share of the gradient's squared norm that its subspace leaves
    out, :math:`1 - \|C\|^2/\|G\|^2`, is above ``residual`` on average over the last ``window``
    calls; or when a refresh turned its subspace by more than ``angle``, which says that the
    old one had missed what now leads. Its rank then is multiplied by ``factor``, up to ``cap``.

    It lives on the host and reads a few numbers of the state a call: call it every step, or
    every tenth. A proposal changes shapes, so a recompilation follows; hence the cooldown.

    Args:
        residual: the largest mean residual energy, in (0, 1]; None does not look at it. Needs
            ``metrics=True`` in the subspace optimizer.
        angle: the largest angle between the bases before and after a refresh, in degrees, of
            the mean squared cosine of their principal angles; None (default) does not look at
            it. For scale: two random subspaces of rank r in m dimensions are
            :math:`\arccos\sqrt{r/m}` apart.
        factor: by which a rank grows, above 1.
        cap: the largest rank; a float is a fraction of the smaller matrix side.
        cooldown: the fewest steps between two proposals.
        window: calls over which the residual is averaged.

    Raises:
        ValueError: if both triggers are None or a number is out of range.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> def make(targets):
        ...     tracker = lro.refresh_basis(4, targets=targets)
        ...     return lro.galore_project(optax.adam(1e-3), tracker, metrics=True)
        >>> params = {"kernel": jnp.eye(16, 32)}
        >>> tx, growth = make(None), lro.RankGrowth(residual=0.5, window=1, cooldown=0)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> targets = growth(state, step=1)
        >>> if targets is not None:
        ...     new_tx = make(targets)
        ...     state, tx = lro.migrate(state, tx, new_tx, params), new_tx
        >>> state.inner_state[0].mu["kernel"].shape
        (8, 32)
    """

    def __init__(
        self,
        residual: float | None = 0.3,
        angle: float | None = None,
        *,
        factor: float = 2.0,
        cap: int | float = 0.5,
        cooldown: int = 500,
        window: int = 10,
    ):
        if residual is None and angle is None:
            raise ValueError("RankGrowth: give residual or angle; without either no rank grows")
        if residual is not None and not 0 < residual <= 1:
            raise ValueError(f"RankGrowth: residual={residual} is a share of energy, in (0, 1]")
        if angle is not None and not 0 < angle <= 90:
            raise ValueError(f"RankGrowth: angle={angle} is in degrees, in (0, 90]")
        if not factor > 1:
            raise ValueError(f"RankGrowth: factor={factor} must be above 1")
        if cooldown < 0 or window < 1:
            raise ValueError(
                f"RankGrowth: cooldown={cooldown} must be at least 0 and window={window} at least 1"
            )
        check_rank(cap, "RankGrowth: cap")
        self.residual, self.angle = residual, angle
        self.factor, self.cap = factor, cap
        self.cooldown, self.window = cooldown, window
        self._last: int | None = None
        self._residuals: dict[str, collections.deque[float]] = {}
        self._bases: dict[str, tuple[int, list[np.ndarray]]] = {}

    def _is_lossy(self, path: str, energy: float | None) -> bool:
        if self.residual is None or energy is None:
            return False
        seen = self._residuals.setdefault(path, collections.deque(maxlen=self.window))
        if math.isfinite(energy):  # not before the first update, and not of a compact gradient
            seen.append(1 - energy)
        return len(seen) == self.window and sum(seen) / len(seen) > self.residual

    def _has_turned(self, projection: Projection, bases: list[Any], refreshes: int) -> bool:
        if self.angle is None:
            return False
        before = self._bases.get(projection.path)
        if before is not None and before[0] == refreshes:
            return False
        now = [_batched(basis, projection) for basis in bases]
        self._bases[projection.path] = refreshes, now
        # The start is random: that the first refresh turns it says nothing.
        if before is None or before[0] == 0:
            return False
        angles = [principal_angle(new, old) for new, old in zip(now, before[1], strict=True)]
        return max(angles) > self.angle

    def _grown(self, projection: Projection) -> int:
        smaller = min(projection.view.rows, projection.view.columns)
        cap = round(self.cap * smaller) if isinstance(self.cap, float) else int(self.cap)
        return max(projection.rank, min(math.ceil(projection.rank * self.factor), cap, smaller))

    def __call__(self, opt_state: OptState, step: int) -> list[tuple[str, Any]] | None:
        """Looks at a state and proposes ranks.

        Args:
            opt_state: the state after an update, through any wrapper.
            step: how many updates there have been.

        Returns:
            None, or rules for ``targets=`` of all targets with their ranks, to build the next
            optimizer from and :func:`migrate` to.

        Raises:
            ValueError: if the state has no targets, or no metrics where they are needed.
        """
        ranks, leaves = {}, []
        for tracker, energies in _watched(opt_state):
            plan = tracker.plan
            leaves += plan.leaves
            if self.residual is not None and energies is None and plan.projections:
                raise ValueError(
                    "RankGrowth: the state holds no metrics to read the residual from; build the "
                    "optimizer with metrics=True, or give residual=None and an angle"
                )
            refreshes = np.asarray(tracker.refreshes)
            for projection, basis in zip(plan.projections, tracker.encoders(), strict=True):
                path, number = projection.path, projection.number
                energy = None if energies is None else float(energies[number])
                sides = [b for b in basis if b is not None]
                due = self._is_lossy(path, energy)
                due |= self._has_turned(projection, sides, int(refreshes[number]))
                if due and self._grown(projection) > projection.rank:
                    ranks[path] = self._grown(projection)
        if not leaves:
            raise ValueError(
                "RankGrowth: the state holds no tracker; pass the state of an optimizer such as "
                "lro.galore_adamw(..., metrics=True)"
            )
        if not ranks or (self._last is not None and step - self._last < self.cooldown):
            return None
        self._last = step
        for path in ranks:  # of a larger subspace nothing has been seen yet
            self._residuals.pop(path, None)
            self._bases.pop(path, None)
        return rules.rank_rules(leaves, ranks)


def _watched(opt_state: OptState) -> Iterator[tuple[TrackerState, np.ndarray | None]]:
    """Each tracker, and the energy of each of its targets where it is known."""
    inside = set()
    for node in find_states(opt_state, SubspaceState):
        energies = None if node.fidelity is None else np.asarray(node.fidelity.energy)
        for tracker in find_states(node.tracker_state, TrackerState):
            inside.add(id(tracker))
            yield tracker, energies
    for tracker in find_states(opt_state, TrackerState):
        if id(tracker) not in inside:
            yield tracker, None
