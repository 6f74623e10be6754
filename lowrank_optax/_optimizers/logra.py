"""LoGRA: any optimizer on learned sketches of the gradients."""

from typing import Any

import optax

from lowrank_optax._bases.learn import learn_basis
from lowrank_optax._inner.carry import Moments
from lowrank_optax._plan import target
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
    target.check_choice("logra_sketch: nonlinearity", nonlinearity, tuple(NONLINEARITIES))
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
