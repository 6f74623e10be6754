"""The lift that adds what the subspace leaves out, at the subspace's step size: ``fira_lift``."""

import jax.numpy as jnp
import optax

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
                whole = scaling.norm(t.gradient, s.leaf_axes)
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
