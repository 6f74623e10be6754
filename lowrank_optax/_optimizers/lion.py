"""Lion in a subspace, done right: ``sign_lift``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays.jaxpr import Jaxpr
from lowrank_optax._arrays.tree import OptState, Params, PyTree, Updates
from lowrank_optax._subspace.lift import Lift


def sign_lift() -> Lift:
    r"""The sign of the lifted momentum: Lion and signSGD, whose step lives in the full space.

    .. math:: \Delta W = \mathrm{sign}(P\,u)

    A sign that is taken of the core and then lifted no longer has entries of one size. Here the
    momentum is low-rank and the step is not.

    The inner optimizer makes the momentum and must not take its sign: ``optax.trace(0.9)`` for
    signSGD with momentum, :func:`lion_momentum` for Lion. Its step size is lost in the sign, so the
    learning rate and weight decay come behind:

    .. code-block:: python

        optax.chain(
            lro.galore_project(lro.lion_momentum(), lift=lro.sign_lift()),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(1e-4),
        )

    Returns:
        A lift for :func:`galore_project`. ``init`` raises ValueError if the inner optimizer takes
        signs, as ``optax.lion`` does. It works on compact gradients.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.galore_project(
        ...     lro.lion_momentum(), lro.refresh_basis(rank=4), lift=lro.sign_lift()
        ... )
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> float(updates["kernel"].max())
        1.0

    References:
        Chen et al., `Symbolic Discovery of Optimization Algorithms
        <https://arxiv.org/abs/2302.06675>`_, 2023
    """

    def update_fn(targets, state):
        return [jnp.sign(t.view.lift(t.update, t.bases)) for t in targets], state

    return Lift(
        "sign_lift",
        lambda plan: optax.EmptyState(),
        update_fn,
        takes_signs=True,
        check_inner=_check_takes_no_sign,
    )


class LionMomentumState(NamedTuple):
    """State of :func:`lion_momentum`.

    Attributes:
        mu: the momentum, a tree like params.
    """

    mu: PyTree


def lion_momentum(b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
    r"""Lion's interpolated momentum, before its sign.

    .. math:: u_t = b_1 m_{t-1} + (1 - b_1)\,g_t, \qquad m_t = b_2 m_{t-1} + (1 - b_2)\,g_t

    The inner optimizer to give to :func:`galore_project` with :func:`sign_lift`.

    Args:
        b1: share of the momentum in the update.
        b2: decay of the momentum.

    Returns:
        A gradient transformation.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tx = lro.lion_momentum()
        >>> updates, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
        >>> print(f"{float(updates[0]):.1f}")
        0.1
    """

    def init_fn(params: Params) -> OptState:
        return LionMomentumState(optax.tree.zeros_like(params))

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        del params

        def mixed(b: float) -> PyTree:
            return jax.tree.map(lambda g, m: (1 - b) * g.astype(m.dtype) + b * m, updates, state.mu)

        return mixed(b1), LionMomentumState(mixed(b2))

    return optax.GradientTransformation(init_fn, update_fn)


def _signs(jaxpr: Jaxpr) -> set[tuple[int, ...]]:
    """The shapes of which a computation takes signs."""
    found = {e.invars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "sign"}
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= _signs(inner)
    return found


def _check_takes_no_sign(inner: optax.GradientTransformation | None, cores: PyTree) -> None:
    if inner is None:
        return
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cores)
    state = jax.eval_shape(inner.init, like)
    jaxpr = jax.make_jaxpr(lambda g, s, p: inner.update(g, s, p))(like, state, like).jaxpr
    taken = _signs(jaxpr) & {x.shape for x in jax.tree.leaves(like)}
    if taken:
        raise ValueError(
            f"sign_lift: the inner optimizer takes the sign of a core of shape {taken.pop()}, in "
            "the subspace, where it is too early; give one that stops before: lro.lion_momentum() "
            "in place of optax.lion or optax.scale_by_lion, optax.trace(0.9) in place of signSGD"
        )
