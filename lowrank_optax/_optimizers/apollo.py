"""The lift that only scales the gradient: ``apollo_lift``."""

from typing import Any

import jax
import optax

from lowrank_optax._arrays.norms import norm
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.schedule import AdaptiveEvery, Every
from lowrank_optax._checks import Rank, check_choice
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._plan.target import Targets
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
    check_choice("apollo_lift: per", per, scaling.PER)
    scaling.check_limit("apollo_lift", limit)

    def update_fn(targets, state):
        scalings = [scaling.scaling(t, per) for t in targets]
        factors = [1.0] * len(targets)
        if limit is not None:
            norms = [
                scaling.matrix_norms(t, s.leaf * norm(t.gradient, s.leaf_axes))
                for t, s in zip(targets, scalings, strict=True)
            ]
            factors, state = scaling.limit_growth(targets, norms, limit, state)
        lifted = []
        for t, s, factor in zip(targets, scalings, factors, strict=True):
            lifted.append(scaling.sign(t) * factor * s.leaf * t.gradient.astype(s.leaf.dtype))
        return lifted, state

    init = scaling.growth_init if limit is not None else lambda plan: optax.EmptyState()
    return Lift("apollo_lift", init, update_fn, needs_gradient=True, needs_gain=True)


def apollo_adamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 128,
    refresh_every: Every | AdaptiveEvery = 200,
    scale: jax.typing.ArrayLike = 1.0,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    per: str = "channel",
    limit: float | None = 1.01,
    side: str = "smaller",
    moments: Moments = "keep",
    mask: Any = None,
    mu_dtype: Any = None,
    stagger: bool = False,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""The gradient at the step size that AdamW has in a random subspace: APOLLO.

    .. math:: \Delta W_t = -\eta\,(\alpha\,G_t\,\mathrm{diag}(s_t) + \lambda W_t), \qquad
              s_{t,j} = \frac{\|\mathrm{adam}(P_t^T G_t)_{:,j}\|}{\|(P_t^T G_t)_{:,j}\|}

    APOLLO-Mini is ``apollo_adamw(..., rank=1, per="tensor")``.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule of the step.
        rank: columns of each basis, or a fraction of each matrix's smaller side.
        refresh_every: steps between two random bases, or a schedule of the step.
        scale: :math:`\alpha`, over that of the paper as :func:`apollo_lift` says. At 1, good
            learning rates are those of ``optax.adamw``.
        b1: as for :func:`galore_adamw`, like everything else that is not said here.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, decoupled, on the whole weight.
        targets: which leaves are projected.
        per: ``"channel"`` or ``"tensor"``: what shares one factor.
        limit: largest growth of the step's norm from one step to the next.
        side: the matrix side that bases live on.
        moments: what happens to moments when the basis is drawn anew. Only their norms matter,
            which ``"keep"`` keeps.
        mask: which leaves decay.
        mu_dtype: dtype of the first moment.
        stagger: spread the leaves' refreshes over the interval.
        metrics: keep fidelity metrics in the state.
        seed: seed of the bases.

    Returns:
        A gradient transformation with extra arguments. It needs full gradients.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tx = lro.apollo_adamw(1e-3, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Zhu et al., `APOLLO: SGD-like Memory, AdamW-level Performance
        <https://arxiv.org/abs/2412.05270>`_, 2024
    """
    return galore_project(
        plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype),
        refresh_basis(
            rank,
            refresh_every,
            method="random",
            side=side,
            targets=targets,
            stagger=stagger,
            seed=seed,
        ),
        scale=scale,
        lift=apollo_lift(per, limit),
        moments=moments,
        metrics=metrics,
    )
