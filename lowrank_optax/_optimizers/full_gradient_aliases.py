"""Whole optimizers by name whose lift uses the full gradient: Fira, APOLLO, LDAdam."""

from typing import Any

import jax
import optax

from lowrank_optax._bases.adaptive import AdaptiveEvery
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.tracker import Every
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._optimizers.apollo import apollo_lift
from lowrank_optax._optimizers.fira import fira_lift
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._optimizers.ldadam import error_feedback
from lowrank_optax._plan.target import Rank, Targets


def fira_adamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 128,
    refresh_every: Every | AdaptiveEvery = 200,
    scale: jax.typing.ArrayLike = 0.25,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    limit: float | None = 1.01,
    method: str = "subspace",
    side: str = "smaller",
    moments: Moments = "rotate",
    mask: Any = None,
    mu_dtype: Any = None,
    stagger: bool = False,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW in a subspace, and the rest of the gradient at the subspace's step size: Fira.

    .. math:: \Delta W_t = -\eta\,\bigl(\alpha\,(P_t\,\mathrm{adam}(P_t^T G_t) +
              \phi_t) + \lambda W_t\bigr)

    with :math:`\phi` the scaled residual of :func:`fira_lift`.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule of the step.
        rank: columns of each basis, or a fraction of each matrix's smaller side.
        refresh_every: steps between refreshes of a basis, or a schedule of the step.
        scale: :math:`\alpha`, the paper's factor on projected updates.
        b1: as for :func:`galore_adamw`, like everything else that is not said here.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, decoupled, on the whole weight.
        targets: which leaves are projected.
        limit: largest growth of the residual's norm from one step to the next.
        method: how bases are found.
        side: the matrix side that bases live on.
        moments: what happens to moments at a refresh.
        mask: which leaves decay.
        mu_dtype: dtype of the first moment.
        stagger: spread the leaves' refreshes over the interval.
        metrics: keep fidelity metrics in the state.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments. It needs full gradients.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tx = lro.fira_adamw(1e-2, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank
        Constraint? <https://arxiv.org/abs/2410.01623>`_, 2024
    """
    return galore_project(
        plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype),
        refresh_basis(
            rank,
            refresh_every,
            method=method,
            side=side,
            targets=targets,
            stagger=stagger,
            seed=seed,
        ),
        scale=scale,
        lift=fira_lift(limit),
        moments=moments,
        metrics=metrics,
    )


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


def ldadamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 128,
    scale: jax.typing.ArrayLike = 1.0,
    b1: float = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    side: str = "smaller",
    mask: Any = None,
    mu_dtype: Any = None,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW in a subspace that follows the gradient at every step, with error feedback: LDAdam.

    One subspace iteration a step, moments carried over by ``"rotate"``, and what is lost added to
    the next gradient by :func:`error_feedback`, which **costs one full-sized buffer a target**. The
    paper's subspace follows a mixture of gradient and momentum, here it follows the gradient
    with its feedback.

    Args:
        learning_rate: a number or a schedule of the step.
        rank: columns of each basis, or a fraction of each matrix's smaller side.
        scale: factor on projected updates.
        b1: as for :func:`galore_adamw`, like everything else that is not said here. A Python
            number, since the feedback of the momentum depends on it.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, on the whole weight.
        targets: which leaves are projected.
        side: the matrix side that bases live on.
        mask: which leaves decay.
        mu_dtype: dtype of the first moment.
        metrics: keep fidelity metrics in the state.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments. It needs full gradients.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tx = lro.ldadamw(1e-3, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient
        Statistics <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    subspace = galore_project(
        plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype),
        refresh_basis(rank, 1, side=side, targets=targets, seed=seed),
        scale=scale,
        metrics=metrics,
    )
    return error_feedback(subspace, b1=b1)
