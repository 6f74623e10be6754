"""Whole optimizers by name, built from the parts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._bases.adaptive import AdaptiveEvery
from lowrank_optax._bases.learn import LEARNING_RATE, learn_basis
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.tracker import Every
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._optimizers.logra import logra_sketch
from lowrank_optax._optimizers.lowrank import sketched_residual_lift
from lowrank_optax._plan.target import Rank, Targets, check_choice


def plain_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    weight_decay: optax.ScalarOrSchedule,
    mask: Any,
    mu_dtype: Any,
) -> optax.GradientTransformation:
    """Adam, with weight decay where there is any."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        # The same updates, without reading every weight to add nothing to it.
        return optax.adam(learning_rate, b1, b2, eps, mu_dtype=mu_dtype)
    return optax.adamw(
        learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask
    )


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


def logra_adamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 32,
    basis_learning_rate: optax.ScalarOrSchedule | str = LEARNING_RATE,
    scale: jax.typing.ArrayLike = 1.0,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    nonlinearity: str = "identity",
    every: Every = 1,
    tied: bool = True,
    normalize: str = "qr",
    init: Any = "gradient",
    side: str = "smaller",
    moments: Moments = "rotate",
    mask: Any = None,
    mu_dtype: Any = None,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW on learned sketches of the gradients: LoGRA.

    .. math:: \Delta W_t = -\eta\,\bigl(\alpha\,U_t\,\mathrm{adam}(\varphi(V_t^T G_t))
              + \lambda W_t\bigr)

    For sparse 0/1 rewards, gradients of most batches are 0 and those of the others are few and
    noisy. Steps without a gradient leave the bases alone, and a small clip with a rank that is not
    too small is a configuration that the tests train:
    ``optax.chain(optax.clip_by_global_norm(0.1), lro.logra_adamw(3e-3, rank=64))``.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule of the step.
        rank: columns of each basis, or a fraction of each matrix's smaller side. Leaves
            whose smaller side is not larger are trained full-rank.
        basis_learning_rate: how fast bases are learned, a number or a schedule of the step, as
            ``learning_rate`` of :func:`learn_basis`; or ``"main/100"``, a hundredth of
            :math:`\eta` at each step, as LoGRA's description has it. At usual :math:`\eta`
            that is a frozen basis in all but name: at 1e-3, the distortion on a rotating
            subspace was 0.85 as with a frozen basis, against 0.043 with the default.
        scale: :math:`\alpha`, a factor on projected updates.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, decoupled, on the whole weight.
        targets: which leaves are projected, as for :func:`refresh_basis`;
            ``lro.targets.logra()`` has a rank for each kind of layer.
        nonlinearity: :math:`\varphi`, as for :func:`logra_sketch`.
        every: steps between two learning steps of a basis, or a schedule of the step.
        tied: whether one matrix projects and lifts, as for :func:`learn_basis`.
        normalize: how its columns are normalised, as for :func:`learn_basis`.
        init: where bases start, as for :func:`learn_basis`.
        side: the matrix side that bases live on.
        moments: what happens to moments when bases move, as for :func:`galore_project`.
        mask: which leaves decay, as for ``optax.adamw``.
        mu_dtype: dtype of the first moment, as for ``optax.adamw``.
        metrics: keep fidelity metrics in the state.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments.

    Example:
        >>> import jax, jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.logra_adamw(1e-3, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> state = tx.init(params)
        >>> grads = jax.grad(lambda p: jnp.sum(p["kernel"] ** 2))(params)
        >>> updates, state = tx.update(grads, state, params)
    """
    if isinstance(basis_learning_rate, str):
        check_choice("logra_adamw: basis_learning_rate", basis_learning_rate, ("main/100",))
        basis_rate = _hundredth(learning_rate)
    else:
        basis_rate = basis_learning_rate
    tracker = learn_basis(
        rank,
        learning_rate=basis_rate,
        every=every,
        tied=tied,
        normalize=normalize,
        init=init,
        side=side,
        targets=targets,
        seed=seed,
    )
    inner = plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype)
    return logra_sketch(
        inner, tracker, scale=scale, nonlinearity=nonlinearity, moments=moments, metrics=metrics
    )


def _hundredth(rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    return (lambda count: rate(count) / 100) if callable(rate) else rate / 100
