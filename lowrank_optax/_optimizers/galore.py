"""GaLore: any optimizer inside a subspace that is refreshed now and then."""

from typing import Any

import optax

from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._inner.carry import Moments
from lowrank_optax._subspace.lift import Lift
from lowrank_optax._subspace.optimizer import subspace_optimizer


def galore_project(
    inner: optax.GradientTransformation | None = None,
    basis: optax.GradientTransformation | None = None,
    *,
    scale: Any = 1.0,
    lift: Lift | None = None,
    moments: Moments = "rotate",
    metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer inside a low-rank subspace of each gradient.

    At each step, for each target with basis :math:`P`,

    .. math:: C_t = P_t^T G_t, \qquad u_t = \mathrm{inner}(C_t), \qquad
              \Delta W_t = \mathrm{scale}\cdot P_t u_t

    so the inner optimizer keeps moments of ``r x n`` and not of ``m x n``. Leaves that are no
    target reach it as they are.

    Weight decay inside ``inner`` acts on the whole weight, as it would without projection,
    and ``scale`` does not apply to it. An inner optimizer that looks at params sees their
    cores, ``PᵀW``. So the trust ratios of LAMB and LARS, which compare the lengths of a weight and
    of its update, belong behind: ``chain(galore_project(scale_by_adam()), scale_by_trust_ratio(),
    scale_by_learning_rate(lr))``. And signs of entries, as Lion takes them, belong after the lift;
    an inner optimizer that keeps Lion's state is warned of at ``init``.

    Args:
        inner: any optax optimizer, ``optax.adamw(schedule, weight_decay=0.1)`` say. None
            makes a filter of the gradient's own shape, :math:`G \to P P^T G`, that may stand
            before anything in a chain but saves no memory there, since the optimizer
            behind it sees full-sized gradients.
        basis: the tracker that keeps the bases, by default ``refresh_basis()``.
        scale: factor on the lifted update of every target.
        lift: how updates return to full size, by default :func:`subspace_lift`.
        moments: what happens to the inner optimizer's moments when a basis changes:
            ``"rotate"`` (default) carries them over to the new one, ``"keep"`` leaves them
            stale, as galore_torch does, ``"reset"`` starts them again from zero (its step
            count goes on), and a callable ``(inner_state, {path: R}) -> inner_state`` gets
            :math:`R = P_{new}^T P_{old}` of each side and target. Moments are found by the
            names of the inner state's fields (``mu``, ``nu``, ``trace``, ``m``, ``v``),
            through wrappers; what is not recognised stays, and :func:`describe` says so.
        metrics: keep the fidelity of each target in the state, for :func:`metrics`.
            Costs one product of full size a step.

    Returns:
        A gradient transformation with extra arguments, all of which reach ``inner``; its
        updates have the dtype of the parameters. Its state is a :class:`SubspaceState`.

    Raises:
        TypeError: if ``inner`` or ``basis`` is no gradient transformation.
        ValueError: if ``basis`` is no tracker or ``moments`` no rule.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = optax.chain(
        ...     optax.clip_by_global_norm(1.0),
        ...     lro.galore_project(optax.adamw(1e-3), lro.refresh_basis(rank=4, every=200)),
        ... )
        >>> params = {"kernel": jnp.ones((16, 32)), "bias": jnp.zeros(32)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> params = optax.apply_updates(params, updates)

    References:
        Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
        <https://arxiv.org/abs/2403.03507>`_, 2024
    """
    return subspace_optimizer(
        "galore_project",
        inner,
        refresh_basis() if basis is None else basis,
        scale=scale,
        lift=lift,
        moments=moments,
        metrics=metrics,
    )
