"""Fira's idea without the full gradient: ``sketched_residual_lift``."""

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_optax._bases.extra_directions import Sketch, check_one_sided
from lowrank_optax._plan import target
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases
from lowrank_optax._subspace import scaling
from lowrank_optax._subspace.lift import Lift


def sketched_residual_lift(
    extra: int | float = 1.0, amplitude: jax.typing.ArrayLike = 1.0, *, seed: int = 0
) -> Lift:
    r"""A random sample of what the subspace leaves out, at the subspace's step size.

    At each step k orthonormal directions Q are drawn at random outside the span of P, and

    .. math:: \Delta W = P\,u + a\,s \odot Q\,Q^T G, \qquad
              s_j = \frac{\|u_{:,j}\|}{\|P^T G_{:,j}\|}

    with the sign of the inner optimizer's updates on the second term. Its mean over draws is
    :math:`a\,k/(m - r)` times the residual :math:`s \odot (I - P P^T) G` that :func:`fira_lift`
    adds, m being the length of the projected side; at k = m − r and a = 1 it is that.

    The gradient is needed only in k more directions, and nothing is stored of them: they are
    drawn from the seed and the step count. So it costs no state, works on compact gradients,
    where :func:`compact_value_and_grad` draws the same directions and widens its one
    backward pass by k columns, and does the same there as on full ones.

    Args:
        extra: k, an int; or a float, as a multiple of each target's rank. At most as many as
            the basis leaves free.
        amplitude: a. Values above 1 weigh the sample towards the whole residual, at more noise.
        seed: seed of the draws.

    Returns:
        A lift for :func:`galore_project`. Targets with bases on both sides are refused at
        ``init``.

    Raises:
        TypeError: if ``extra`` is no static number.
        ValueError: if ``extra`` is not positive.

    Example:
        >>> import optax, lowrank_optax as lro
        >>> tx = lro.galore_project(
        ...     optax.adamw(1e-2),
        ...     lro.refresh_basis(rank=32, every=50, method="random"),
        ...     lift=lro.sketched_residual_lift(),
        ... )
    """
    target.check_static("sketched_residual_lift: extra", extra)
    if isinstance(extra, bool) or not isinstance(extra, int | float | np.integer | np.floating):
        raise TypeError(f"sketched_residual_lift: extra must be a number, got {extra!r}")
    if not (np.isfinite(extra) and extra > 0):
        raise ValueError(
            f"sketched_residual_lift: extra={extra} draws no direction; use an int of at least "
            "1, a float that is a multiple of the rank, or lro.subspace_lift()"
        )
    sketch = Sketch(extra, seed)

    def init_fn(plan):
        check_one_sided("sketched_residual_lift", [plan.leaves[i] for i in plan.targets])
        return sketch

    def update_fn(targets, state):
        lifted = []
        for t in targets:
            side = REDUCTION if t.bases.reduction is not None else OUTPUT
            factors = amplitude * scaling.sign(t) * scaling.scaling(t, "channel").core
            # One product of full size, with the columns [P | Q].
            axis = t.view.core_axes([side])[side]
            core = jnp.concatenate([t.update, factors * t.extra], axis)
            both = [getattr(b, side) for b in (t.bases, t.directions)]
            basis = jnp.concatenate([b.astype(core.dtype) for b in both], -1)
            lifted.append(t.view.lift(core, Bases(**{side: basis})))
        return lifted, state

    return Lift("sketched_residual_lift", init_fn, update_fn, needs_gain=True)
