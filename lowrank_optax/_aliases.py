"""Whole optimizers by name, built from the parts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._moments import Moments
from lowrank_optax._refresh import Every, refresh_basis
from lowrank_optax._subspace import galore_project
from lowrank_optax._target import Rank, Targets


def galore_adamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 128,
    refresh_every: Every = 200,
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
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        # The same updates, without reading every weight to add nothing to it.
        inner = optax.adam(learning_rate, b1, b2, eps, mu_dtype=mu_dtype)
    else:
        inner = optax.adamw(
            learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask
        )
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
