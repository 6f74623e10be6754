"""An interval between refreshes that grows while the subspace stays where it is."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lowrank_optax._arrays.orthonormal import gram
from lowrank_optax._plan.view import Bases, View


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
