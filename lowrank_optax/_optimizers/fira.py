"""The lift that adds what the subspace leaves out, at the subspace's step size: ``fira_lift``."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays.norms import norm
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.schedule import AdaptiveEvery, Every
from lowrank_optax._checks import Rank
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._plan.target import Targets
from lowrank_optax._subspace import scaling
from lowrank_optax._subspace.lift import Lift


def fira_lift(limit: float | None = 1.01) -> Lift:
    r"""Fira's lift: the residual of the gradient, scaled like the columns of the core.

    .. math:: \Delta W = P\,u + \phi, \qquad
              \phi_{:,j} = \frac{\|u_{:,j}\|}{\|C_{:,j}\|}\,\bigl((I - P P^T) G\bigr)_{:,j}

    with the sign of the inner optimizer's updates on :math:`\phi`, and
    :math:`\|\phi_t\| \le \mathrm{limit}\cdot\|\phi_{t-1}\|`. A channel is an index of the side that
    has no basis. A target with bases on both sides has one factor for the whole matrix.

    The full gradient is needed, so :func:`compact_value_and_grad` cannot serve it;
    :func:`sketched_residual_lift` is the one that works there.

    Args:
        limit: largest growth of the residual's norm from one step to the next, per matrix. The
            first step is not limited. Learning-rate schedules inside the inner optimizer do not
            count as growth. None turns the limiter off, and its state of one number a matrix.

    Returns:
        A lift for :func:`galore_project`.

    Raises:
        ValueError: if ``limit`` is below 1.

    Example:
        >>> import optax, lowrank_optax as lro
        >>> tx = lro.galore_project(
        ...     optax.adamw(1e-3), lro.refresh_basis(rank=32), lift=lro.fira_lift()
        ... )

    References:
        Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank
        Constraint? <https://arxiv.org/abs/2410.01623>`_, 2024
    """
    scaling.check_limit("fira_lift", limit)

    def update_fn(targets, state):
        scalings = [scaling.scaling(t, "channel") for t in targets]
        factors = [1.0] * len(targets)
        if limit is not None:
            norms = []
            for t, s in zip(targets, scalings, strict=True):
                whole = norm(t.gradient, s.leaf_axes)
                share = s.length / jnp.where(whole > 0, whole, 1)
                left = whole * jnp.sqrt(jnp.maximum(1 - jnp.square(share), 0))
                norms.append(scaling.matrix_norms(t, s.leaf * left))
            factors, state = scaling.limit_growth(targets, norms, limit, state)
        lifted = []
        for t, s, factor in zip(targets, scalings, factors, strict=True):
            factor = factor * scaling.sign(t)
            # P u + s (G − P C) = P (u − s C) + s G: one product of full size.
            core = t.update - scaling.on_core(t, factor) * s.core * t.core
            gradient = t.gradient.astype(core.dtype)
            lifted.append(t.view.lift(core, t.bases) + factor * s.leaf * gradient)
        return lifted, state

    init = scaling.growth_init if limit is not None else lambda plan: optax.EmptyState()
    return Lift("fira_lift", init, update_fn, needs_gradient=True, needs_gain=True)


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
