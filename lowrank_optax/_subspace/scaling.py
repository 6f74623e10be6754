"""Step sizes read off the core: how much longer the inner optimizer made each column."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import on_replicated, wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.norms import norm
from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.view import BOTH, other
from lowrank_optax._subspace.lift import LiftInput

PER = ("channel", "tensor")


class Scaling(NamedTuple):
    """The factors ‖u‖/‖C‖ of one target.

    Attributes:
        core: broadcasting against the core.
        leaf: broadcasting against the leaf.
        length: ‖C‖, of the shape of ``leaf``.
        leaf_axes: the leaf's axes that a factor is common to.
    """

    core: Array
    leaf: Array
    length: Array
    leaf_axes: tuple[int, ...]


def scaling(target: LiftInput, per: str) -> Scaling:
    r""":math:`s = \|u\| / \|C\|`, of each column or of the whole matrix.

    A channel is an index of the side without a basis; a target with bases on both sides has none,
    and one factor. The factor of a zero core is 0.

    Args:
        target: what the lift sees of one target.
        per: ``"channel"`` or ``"tensor"``.

    Returns:
        The factors, of the core's axes and of the leaf's.
    """
    view = target.view
    sides = [side for side in BOTH if target.bases.on(side) is not None]
    batch = tuple(range(len(view.batch_axes)))
    if per == "channel" and len(sides) == 1:
        core_axes = (view.core_axes(sides)[sides[0]],)
        common = view.side_axes(sides[0])
        kept = view.batch_axes + view.side_axes(other(sides[0]))
    else:
        core_axes = tuple(range(len(batch), target.core.ndim))
        common = view.reduction_axes + view.output_axes
        kept = view.batch_axes
    length, step = norm(target.core, core_axes), norm(target.update, core_axes)
    factors = jnp.where(length > 0, step / jnp.where(length > 0, length, 1), 0)
    on_leaf = view.spread(jnp.squeeze(factors, core_axes), kept)
    return Scaling(factors, on_leaf, view.spread(jnp.squeeze(length, core_axes), kept), common)


def matrix_norms(target: LiftInput, x: Float[Array, "..."]) -> Float[Array, "*batch"]:
    """The norm of each matrix of an array that broadcasts against the leaf."""
    axes = target.view.reduction_axes + target.view.output_axes
    return jnp.squeeze(norm(x, axes), axes)


def check_limit(name: str, limit: float | None) -> None:
    """Raises ValueError if a limiter would shrink every step."""
    if limit is not None and not limit >= 1:
        raise ValueError(f"{name}: limit={limit} must be at least 1, or None for no limiter")


def on_core(target: LiftInput, factor: Any) -> Any:
    """A factor of each matrix, given against the leaf's axes, against the core's."""
    if jnp.ndim(factor) == 0:
        return factor
    axes = target.view.reduction_axes + target.view.output_axes
    ends = (1,) * (target.core.ndim - len(target.view.batch_axes))
    return jnp.squeeze(factor, axes).reshape(*target.view.batch_shape, *ends)


def sign(target: LiftInput) -> Array:
    """The sign of the inner optimizer's updates: −1 where they are to be added to params."""
    assert target.gain is not None
    return jnp.sign(target.gain).astype(wide_dtype(target.gain))


class GrowthState(NamedTuple):
    """State of the growth limiter.

    Attributes:
        limited_norm: the norm of each matrix's last step as limited, over its gain, targets one
            after the other and batch entries within; 0 where there has been none.
    """

    limited_norm: Array


def _matrices(plan: Plan) -> list[int]:
    return [math.prod(projection.view.batch_shape) for projection in plan.projections]


def growth_init(plan: Plan) -> GrowthState:
    """The state before the first step."""
    return GrowthState(jnp.zeros(max(1, sum(_matrices(plan))), jnp.float32))


def limit_growth(
    targets: Sequence[LiftInput], norms: Sequence[Array], limit: float, state: GrowthState
) -> tuple[list[Array], GrowthState]:
    r"""The norm-growth limiter: a step is at most ``limit`` times as long as the one before.

    .. math:: \phi_t \leftarrow \phi_t \cdot
              \min\bigl(1, \gamma\,\|\phi_{t-1}\| / \|\phi_t\|\bigr)

    Norms are taken over the gain, so that a learning rate inside the inner optimizer may grow as
    fast as it likes. The first step that is not zero is not limited.

    Args:
        targets: what the lift sees.
        norms: for each target ‖φ‖ of each matrix, in the batch shape.
        limit: γ.
        state: the state.

    Returns:
        For each target factors that broadcast against the leaf, and the new state.
    """
    if not targets:
        return [], state
    gains: list[Any] = [abs(t.gain) for t in targets if t.gain is not None]
    unit = [jnp.where(gain > 0, gain, 1) for gain in gains]
    flat = [
        on_replicated(jnp.ravel, x / u.astype(x.dtype)) for x, u in zip(norms, unit, strict=True)
    ]
    new = jnp.concatenate(flat).astype(jnp.float32)
    last = state.limited_norm
    seen = (last > 0) & (new > 0) & jnp.isfinite(new)
    factor = jnp.where(seen, jnp.minimum(1.0, limit * last / jnp.where(seen, new, 1)), 1.0)
    kept = jnp.where((new > 0) & jnp.isfinite(new), new * factor, last)
    factors, start = [], 0
    for target, norms_here in zip(targets, norms, strict=True):
        part = jax.lax.slice_in_dim(factor, start, start + norms_here.size)
        part = part.reshape(norms_here.shape)
        part = place_like(part, norms_here)
        factors.append(target.view.spread(part, target.view.batch_axes))
        start += norms_here.size
    return factors, GrowthState(kept)
