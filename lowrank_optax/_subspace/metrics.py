"""What a subspace loses: the fidelity of each target, and a report of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.norms import norm, unit
from lowrank_optax._arrays.tree import OptState, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._plan.plan import Plan
from lowrank_optax._subspace.state import SubspaceState
from lowrank_optax._text import table


class Fidelity(NamedTuple):
    r"""How well :math:`\tilde G`, the gradient in the subspace, stands for G.

    :math:`\tilde G` is the lifted core that the inner optimizer sees: :math:`P P^T G`, or
    :math:`U\varphi(V^T G)` of a sketch.

    Scalars for one target; vectors with one entry a target in an optimizer state.

    Attributes:
        energy: share of the squared norm that the core holds, ‖C‖²/‖G‖².
        distortion: relative error ε = ‖G − G̃‖/‖G‖.
        effective_snr: ‖G̃‖/‖G − G̃‖; for an orthonormal basis √(1−ε²)/ε, at most 1e7.
        grad_norm_ratio: ‖G̃‖/‖G‖.
        cosine: cosine of the angle between G̃ and G.
        sign_flip_rate: share of entries whose sign differs.
    """

    energy: Array
    distortion: Array
    effective_snr: Array
    grad_norm_ratio: Array
    cosine: Array
    sign_flip_rate: Array


# Of a gradient that never existed nothing is known that its core does not say.
_UNKNOWN: Any = jnp.nan
UNKNOWN = Fidelity(*([_UNKNOWN] * len(Fidelity._fields)))

# Where nothing is lost the ratio of norms has no value; float32 tells no larger one apart.
_LARGEST_SNR = 1e7


def fidelity(
    gradient: Float[Array, "..."], core: Float[Array, "..."], approximation: Float[Array, "..."]
) -> Fidelity:
    """Compares a gradient with its approximation.

    Args:
        gradient: G.
        core: C, the coordinates of the approximation.
        approximation: G̃, of the shape of G.

    Returns:
        Scalars, finite for any finite input. A zero gradient loses nothing: its energy and
        cosine are 1, its distortion 0.
    """
    wide = wide_dtype(gradient)
    # Ratios of norms do not depend on the unit; this one keeps products in range.
    scale = unit(gradient.astype(wide))
    g, c, a = (x.astype(wide) / scale for x in (gradient, core, approximation))
    whole, kept, lost = norm(g), norm(a), norm(g - a)
    zero = whole == 0
    safe = jnp.where(zero, 1, whole)
    floor = jnp.maximum(whole, kept) / _LARGEST_SNR
    distortion = jnp.where(zero, 0.0, lost / safe)
    snr = jnp.where(zero, _LARGEST_SNR, kept / jnp.maximum(lost, jnp.where(zero, 1, floor)))
    inner = jnp.sum(g * a) / (safe * jnp.where(kept > 0, kept, 1))
    return Fidelity(
        energy=jnp.where(zero, 1.0, jnp.square(norm(c) / safe)),
        distortion=distortion,
        effective_snr=jnp.minimum(snr, _LARGEST_SNR),
        grad_norm_ratio=jnp.where(zero, 1.0, kept / safe),
        cosine=jnp.where(zero, 1.0, inner),
        sign_flip_rate=jnp.mean(jnp.sign(g) != jnp.sign(a), dtype=jnp.float32),
    )


def empty_fidelity(plan: Plan) -> Fidelity:
    """The fidelity before the first update: nothing is known, so NaN."""
    size = max(1, len(plan.projections))
    # An array each: a step that is given one buffer twice cannot donate it.
    return Fidelity(*(jnp.full(size, jnp.nan, jnp.float32) for _ in Fidelity._fields))


def stack_fidelities(fidelities: list[Fidelity], plan: Plan) -> Fidelity:
    """One vector a quantity, from one scalar a target."""
    if not fidelities:
        return empty_fidelity(plan)
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v, jnp.float32) for v in x]), *fidelities)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What :func:`metrics` returns.

    Attributes:
        leaves: for each target's path, its :class:`Fidelity` as scalars.
        refreshes: for each target's path, how often its basis was replaced.
        worst: for each quantity, the value of the target where most is lost.
        layer_snr_min: the smallest ``effective_snr``.
        layer_snr_min_leaf: the path of the target that has it.
    """

    leaves: dict[str, Fidelity]
    refreshes: dict[str, Array]
    worst: Fidelity
    layer_snr_min: Array
    layer_snr_min_leaf: str

    def __str__(self) -> str:
        head = ("leaf", *Fidelity._fields, "refreshes")
        rows = [
            (path, *(f"{float(x):.4g}" for x in leaf), str(int(self.refreshes[path])))
            for path, leaf in self.leaves.items()
        ]
        return table(head, rows, left=1)


def _worst(name: str, values: Array) -> Array:
    if name in ("distortion", "sign_flip_rate"):
        return jnp.max(values)
    if name == "grad_norm_ratio":
        # A sketch whose columns are not orthonormal may also be longer than its gradient.
        return values[jnp.argmax(jnp.abs(jnp.log(values)))]
    return jnp.min(values)


def metrics(opt_state: OptState) -> Metrics:
    """Reads what the last update lost, per leaf, from an optimizer state.

    Args:
        opt_state: a state of an optimizer that holds a :func:`galore_project` or
            :func:`logra_sketch` with ``metrics=True``, through any wrapper.

    Returns:
        The fidelity of every target, the refresh counts, and the worst of each. Values are
        NaN before the first update. Indices of minima need concrete arrays: call it
        outside ``jit``.

    Raises:
        ValueError: if the state holds no metrics.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> params = {"kernel": jnp.ones((8, 16))}
        >>> tx = lro.galore_project(optax.adam(1e-3), lro.refresh_basis(rank=2), metrics=True)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> float(lro.metrics(state).leaves["kernel"].energy.round(3))
        1.0
    """
    leaves: dict[str, Fidelity] = {}
    refreshes: dict[str, Array] = {}
    for state in find_states(opt_state, SubspaceState):
        if state.fidelity is None:
            continue
        for tracker in find_states(state.tracker_state, TrackerState):
            for projection in tracker.plan.projections:
                path, number = projection.path, projection.number
                leaves[path] = Fidelity(*(x[number] for x in state.fidelity))
                refreshes[path] = tracker.refreshes[number]
    if not leaves:
        raise ValueError(
            "this optimizer state holds no metrics; build the optimizer with metrics=True, e.g. "
            "lro.galore_project(..., metrics=True), and pass the state that update returned"
        )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *leaves.values())
    worst = Fidelity(*(_worst(name, x) for name, x in stacked._asdict().items()))
    where = int(jnp.argmin(stacked.effective_snr))
    return Metrics(leaves, refreshes, worst, worst.effective_snr, list(leaves)[where])
