"""The lift that only scales the gradient: ``apollo_lift``."""

import optax

from lowrank_optax._plan import target
from lowrank_optax._subspace import scaling
from lowrank_optax._subspace.lift import Lift


def apollo_lift(per: str = "channel", limit: float | None = 1.01) -> Lift:
    r"""APOLLO's lift: the gradient itself, at the step size that the subspace has.

    .. math:: \Delta W_{:,j} = \frac{\|u_{:,j}\|}{\|C_{:,j}\|}\,G_{:,j} \quad\text{or}\quad
              \Delta W = \frac{\|u\|}{\|C\|}\,G

    with the sign of the inner optimizer's updates, and
    :math:`\|\Delta W_t\| \le \mathrm{limit}\cdot\|\Delta W_{t-1}\|`. Made for a random basis,
    ``refresh_basis(method="random")``, and ``moments="keep"``: only norms are read.

    The basis is orthonormal here, so that at ``scale=1`` steps have the size of the full-rank
    inner optimizer's. The paper's projection has entries of variance 1/r, which makes its factors
    :math:`\sqrt{r/m}` of these, m being the projected side: its scale :math:`\alpha` is
    :math:`\alpha\sqrt{r/m}` here.

    The full gradient is needed, so :func:`compact_value_and_grad` cannot serve it.

    Args:
        per: ``"channel"``, one factor for each index of the side that has no basis; or
            ``"tensor"``, one for the matrix, as APOLLO-Mini has it at rank 1.
        limit: largest growth of the step's norm from one step to the next, per matrix, as for
            :func:`fira_lift`; None turns it off.

    Returns:
        A lift for :func:`galore_project`.

    Raises:
        ValueError: if ``per`` is neither, or ``limit`` below 1.

    Example:
        >>> import optax, lowrank_optax as lro
        >>> mini = lro.galore_project(
        ...     optax.adamw(1e-3),
        ...     lro.refresh_basis(rank=1, method="random"),
        ...     lift=lro.apollo_lift(per="tensor"),
        ...     moments="keep",
        ... )

    References:
        Zhu et al., `APOLLO: SGD-like Memory, AdamW-level Performance
        <https://arxiv.org/abs/2412.05270>`_, 2024
    """
    target.check_choice("apollo_lift: per", per, scaling.PER)
    scaling.check_limit("apollo_lift", limit)

    def update_fn(targets, state):
        scalings = [scaling.scaling(t, per) for t in targets]
        factors = [1.0] * len(targets)
        if limit is not None:
            norms = [
                scaling.matrix_norms(t, s.leaf * scaling.norm(t.gradient, s.leaf_axes))
                for t, s in zip(targets, scalings, strict=True)
            ]
            factors, state = scaling.limit_growth(targets, norms, limit, state)
        lifted = []
        for t, s, factor in zip(targets, scalings, factors, strict=True):
            lifted.append(scaling.sign(t) * factor * s.leaf * t.gradient.astype(s.leaf.dtype))
        return lifted, state

    init = scaling.growth_init if limit is not None else lambda plan: optax.EmptyState()
    return Lift("apollo_lift", init, update_fn, needs_gradient=True, needs_gain=True)
