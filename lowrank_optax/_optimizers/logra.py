"""LoGRA: any optimizer on learned sketches of the gradients."""

from typing import Any

import jax
import optax

from lowrank_optax._bases.learn import LEARNING_RATE, learn_basis
from lowrank_optax._bases.schedule import Every
from lowrank_optax._checks import Rank, check_choice
from lowrank_optax._inner.carry import Moments
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._plan.target import Targets
from lowrank_optax._subspace.lift import Lift
from lowrank_optax._subspace.nonlinearity import NONLINEARITIES
from lowrank_optax._subspace.optimizer import subspace_optimizer


def logra_sketch(
    inner: optax.GradientTransformation | None = None,
    basis: optax.GradientTransformation | None = None,
    *,
    scale: Any = 1.0,
    nonlinearity: str = "identity",
    lift: Lift | None = None,
    moments: Moments = "rotate",
    metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer on learned low-rank sketches of the gradients.

    The sketch of a gradient is :math:`\tilde G = U\,\varphi(V^T G)`, with matrices that a tracker
    learns. What the inner optimizer sees is the core in it,

    .. math:: C_t = \varphi(V_t^T G_t), \qquad u_t = \mathrm{inner}(C_t), \qquad
              \Delta W_t = \mathrm{scale}\cdot U_t u_t

    This is :func:`galore_project` with another default for ``basis`` and with
    :math:`\varphi`; everything said there of decay, moments and full-rank leaves holds here.

    To clip sketches, clip in front of ``inner``: the norm of a core is that of the sketch that
    it stands for, as long as the basis is orthonormal.

    Figures that are told of such sketches do not all go together. For an orthonormal basis the
    effective snr is :math:`\sqrt{1 - \varepsilon^2} / \varepsilon`, so an snr above 50 asks for a
    distortion :math:`\varepsilon` below 2.0 %, and a share of 99.57 % of the energy is an snr
    of 15. Watch them with ``metrics=True`` and set thresholds to what your gradients allow.

    Args:
        inner: any optax optimizer; None makes a filter of the gradient's own shape,
            :math:`G \to \tilde G`, which saves no memory in front of an optimizer.
        basis: the tracker, by default ``learn_basis(rank=32)``.
        scale: factor on the lifted update of every target.
        nonlinearity: :math:`\varphi`, on the core of each target:

            - ``"identity"`` (default);
            - ``"soft_clip"``: :math:`s\tanh(x/s)`, with s three times the RMS of the
              *channel*, the row of ``VᵀG`` that belongs to one column of V;
            - ``"wiener"``: each channel times :math:`\sigma(\log\mathrm{snr})`, its snr
              being measured against what the subspace leaves out of G; needs full gradients;
            - ``"sigmoid"``: :math:`\sigma(x)` entry by entry, the description's own formula, for
              comparison only. It loses signs, and a zero gradient becomes the update
              :math:`U\tfrac12`.
        lift: how updates return to full size, by default :func:`subspace_lift`. It lifts with
            U.
        moments: what happens to the inner optimizer's moments when a basis changes, which a
            learned one does at each step; ``"rotate"`` (default) carries them over by r by r
            matrices that are near the identity.
        metrics: keep the fidelity of each target in the state, for :func:`metrics`; it
            compares :math:`\tilde G` with G.

    Returns:
        A gradient transformation with extra arguments, whose state is a
        :class:`SubspaceState`.

    Raises:
        TypeError: if ``inner`` or ``basis`` is no gradient transformation.
        ValueError: if ``basis`` is no tracker, or a choice is none of those above.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        >>> tx = lro.logra_sketch(clipped, lro.learn_basis(rank=4))
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> updates["kernel"].shape
        (16, 32)
    """
    check_choice("logra_sketch: nonlinearity", nonlinearity, tuple(NONLINEARITIES))
    return subspace_optimizer(
        "logra_sketch",
        inner,
        learn_basis(rank=32) if basis is None else basis,
        scale=scale,
        lift=lift,
        moments=moments,
        metrics=metrics,
        nonlinearity=NONLINEARITIES[nonlinearity],
    )


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
