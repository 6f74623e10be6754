"""Fira's idea without the full gradient: ``sketched_residual_lift``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowrank_optax._bases.extra_directions import ExtraDirections, check_one_sided
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.schedule import Every
from lowrank_optax._checks import Rank, check_static
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._plan.target import Targets
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
    check_static("sketched_residual_lift: extra", extra)
    if isinstance(extra, bool) or not isinstance(extra, int | float | np.integer | np.floating):
        raise TypeError(f"sketched_residual_lift: extra must be a number, got {extra!r}")
    if not (np.isfinite(extra) and extra > 0):
        raise ValueError(
            f"sketched_residual_lift: extra={extra} draws no direction; use an int of at least "
            "1, a float that is a multiple of the rank, or lro.subspace_lift()"
        )
    directions = ExtraDirections(extra, seed)

    def init_fn(plan):
        check_one_sided("sketched_residual_lift", plan.projections)
        return directions

    def update_fn(targets, state):
        lifted = []
        for t in targets:
            side = REDUCTION if t.bases.reduction is not None else OUTPUT
            factors = amplitude * scaling.sign(t) * scaling.scaling(t, "channel").core
            # One product of full size, with the columns [P | Q].
            axis = t.view.core_axes([side])[side]
            core = jnp.concatenate([t.update, factors * t.extra], axis)
            both = [b.only() for b in (t.bases, t.directions)]
            basis = jnp.concatenate([b.astype(core.dtype) for b in both], -1)
            lifted.append(t.view.lift(core, Bases.of(side, basis)))
        return lifted, state

    return Lift("sketched_residual_lift", init_fn, update_fn, needs_gain=True)


def lowrank_adamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 0.25,
    refresh_every: Every = 200,
    scale: jax.typing.ArrayLike = 0.25,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    extra: int | float = 1.0,
    side: str = "smaller",
    moments: Moments = "rotate",
    mask: Any = None,
    mu_dtype: Any = None,
    stagger: bool = False,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW in random subspaces, with a sample of what they leave out: the one to start with.

    .. math:: \Delta W_t = -\eta\,\bigl(\alpha\,(P_t\,u_t + s_t \odot Q_t Q_t^T G_t)
              + \lambda W_t\bigr), \qquad u_t = \mathrm{adam}(P_t^T G_t), \qquad
              s_{t,j} = \frac{\|u_{t,j}\|}{\|P_t^T G_{t,j}\|}

    P is a random orthonormal basis, drawn anew at each refresh; Q holds random directions
    outside its span, drawn anew at every step and never stored; j counts columns. It needs no
    factorization of a gradient, and with :func:`compact_value_and_grad` no gradient at all.
    In this library's benchmark it was ahead of every optimizer that keeps to a subspace, at
    their bytes, and its lead over AdamW shrank with the length of training: see
    ``benchmarks/RESULTS.md``.

    It is :func:`galore_project` around ``optax.adamw`` with
    ``refresh_basis(method="random", dtype=jnp.bfloat16)`` and :func:`sketched_residual_lift`.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule of the step. Leaves that are trained
            full-rank have this rate, projected ones ``scale`` times it; with the default scale,
            good values are three to ten times those of ``optax.adamw``.
        rank: columns of each basis, or a fraction of each matrix's smaller side. Leaves
            whose smaller side is not larger are trained full-rank.
        refresh_every: steps between refreshes of a basis, or a schedule of the step.
        scale: :math:`\alpha`, on the updates of projected leaves.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, decoupled, on the whole weight.
        targets: which leaves are projected, as for :func:`refresh_basis`.
        extra: columns of Q, an int; or a float, as a multiple of the rank.
        side: the matrix side that bases live on, not ``"both"``.
        moments: what happens to moments at a refresh, as for :func:`galore_project`.
        mask: which leaves decay, as for ``optax.adamw``.
        mu_dtype: dtype of the first moment, as for ``optax.adamw``.
        stagger: spread the leaves' refreshes over the interval.
        metrics: keep fidelity metrics in the state.
        seed: seed of the draws.

    Returns:
        A gradient transformation with extra arguments.

    Raises:
        TypeError: if a static argument is an array or has the wrong type.
        ValueError: if an argument is out of its range, at construction or, naming the leaf, at
            ``init``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.lowrank_adamw(1e-2, rank=0.25)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> state = tx.init(params)
        >>> grads = jax.grad(lambda p: jnp.sum(p["kernel"] ** 2))(params)
        >>> updates, state = tx.update(grads, state, params)

    References:
        Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?
        <https://arxiv.org/abs/2410.01623>`_, 2024 (the scale of the residual)
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
            dtype=jnp.bfloat16,
            seed=seed,
        ),
        scale=scale,
        lift=sketched_residual_lift(extra, seed=seed),
        moments=moments,
        metrics=metrics,
    )
