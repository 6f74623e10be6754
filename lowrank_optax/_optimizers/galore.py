"""GaLore: any optimizer inside a subspace that is refreshed now and then."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.schedule import AdaptiveEvery, Every
from lowrank_optax._checks import Rank
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._plan.target import Targets
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


def galore_adamw(
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
    method: str = "subspace",
    side: str = "smaller",
    moments: Moments = "rotate",
    mask: Any = None,
    mu_dtype: Any = None,
    stagger: bool = False,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW in a low-rank subspace of each gradient: GaLore.

    .. math:: \Delta W_t = -\eta\,\bigl(\alpha\,P_t\,\mathrm{adam}(P_t^T G_t) + \lambda W_t\bigr)

    Args:
        learning_rate: :math:`\eta`, a number or a schedule of the step. With the default
            scale, good values are three to ten times those of ``optax.adamw``.
        rank: columns of each basis, or a fraction of each matrix's smaller side. Leaves
            whose smaller side is not larger are trained full-rank.
        refresh_every: steps between refreshes of a basis, or a schedule of the step.
        scale: :math:`\alpha`, the paper's factor on projected updates.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, decoupled, on the whole weight.
        targets: which leaves are projected, as for :func:`refresh_basis`.
        method: how bases are found, as for :func:`refresh_basis`.
        side: the matrix side that bases live on.
        moments: what happens to moments at a refresh, as for :func:`galore_project`.
        mask: which leaves decay, as for ``optax.adamw``.
        mu_dtype: dtype of the first moment, as for ``optax.adamw``.
        stagger: spread the leaves' refreshes over the interval.
        metrics: keep fidelity metrics in the state.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments.

    Example:
        >>> import jax, jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.galore_adamw(1e-2, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> state = tx.init(params)
        >>> grads = jax.grad(lambda p: jnp.sum(p["kernel"] ** 2))(params)
        >>> updates, state = tx.update(grads, state, params)

    References:
        Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
        <https://arxiv.org/abs/2403.03507>`_, 2024
    """
    inner = plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype)
    tracker = refresh_basis(
        rank,
        refresh_every,
        method=method,
        side=side,
        targets=targets,
        stagger=stagger,
        dtype=jnp.float32,
        seed=seed,
    )
    return galore_project(inner, tracker, scale=scale, moments=moments, metrics=metrics)
