"""The tracker that learns bases a little at every step: ``learn_basis``."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.orthonormal import orthonormalize
from lowrank_optax._bases import autoencoder, find, storage
from lowrank_optax._bases.schedule import Every, Schedule, check_every
from lowrank_optax._bases.tracker import make_tracker, random_start
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import Plan, Projection, Tracking
from lowrank_optax._plan.target import SIDES, Targets
from lowrank_optax._plan.view import Bases

INITS = ("gradient", "random")
# Measured on rotating subspaces of rank 4 and 16, under 5 to 100 % noise: less falls behind, and
# more hardly lowers the distortion of this gradient but raises that of the next one.
LEARNING_RATE = 10.0


def _check_learning_rate(rate: object) -> None:
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        if not 0 <= rate < float("inf"):
            raise ValueError(f"learn_basis: learning_rate={rate} must be finite and not negative")
    elif not callable(rate) and not hasattr(rate, "dtype"):
        raise TypeError(
            "learn_basis: learning_rate must be a number or a schedule of the step, got "
            f"{rate!r}; for a share of the main one write learning_rate=lambda t: schedule(t) / 100"
        )


def _captured(plan: Plan, captured: Mapping[str, Any], dtype: Any) -> list[Bases]:
    """The leading columns of given bases, one entry a target, orthonormal."""

    def one(projection: Projection, side: str) -> jax.Array:
        basis = getattr(captured.get(projection.path), side, None)
        expected = projection.view.basis_shape(side, projection.rank)
        found = None if basis is None else tuple(basis.shape)
        if found is None or found[:-1] != expected[:-1] or found[-1] < projection.rank:
            raise ValueError(
                f"{projection.path!r}: init has "
                f"{'no basis' if found is None else f'shape {found}'} for its {side} side, "
                f"expected shape {expected}; capture with this tracker's rank, side and targets: "
                "lro.activation_basis(loss_fn, params, batches, rank=..., side=..., targets=...)"
            )
        wide = wide_dtype(dtype)
        key = find.leaf_key(plan.tracking.seed, 0, projection.number)
        fill = find.random_directions(key, projection.view, side, projection.rank, wide)
        columns = jnp.asarray(basis)[..., : projection.rank].astype(wide)
        return orthonormalize(columns, fill, len(projection.view.batch_axes)).astype(dtype)

    return [
        Bases(**{side: one(projection, side) for side in projection.sides})
        for projection in plan.projections
    ]


def learn_basis(
    rank: Rank = 32,
    *,
    learning_rate: optax.ScalarOrSchedule = LEARNING_RATE,
    every: Every = 1,
    tied: bool = True,
    init: str | Mapping[str, Bases] = "gradient",
    side: str = "smaller",
    targets: Targets = None,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Learns a basis of each gradient's subspace, one descent step at a time.

    A tracker: updates pass through unchanged. Its bases are the weights of a linear autoencoder
    of gradients, whose loss is the squared distortion

    .. math:: \ell = \|G - U V^T G\|^2 / \|G\|^2

    With ``tied`` matrices :math:`U = V = P` its descent is Oja's rule,

    .. math:: P \leftarrow \mathrm{orth}\bigl(P + 2\eta\,(I - PP^T)\,S P\,(I + 2\eta P^TSP)^{-1}
              \bigr), \qquad S = GG^T / \|G\|^2

    which follows a subspace that moves, where a refreshed basis waits for its interval to end. S is
    never formed; a step costs two products of G with a matrix of r columns (four if untied). The
    last factor damps the step: for a small :math:`\eta` it is 1, and for a large one the
    step becomes a power iteration, so no learning rate is too large for the tied rule.

    A step that sees a gradient with a NaN, an infinity or only zeros leaves the basis as it is,
    and the next one tries again.

    Args:
        rank: columns of each basis, or a fraction of each matrix's smaller side, as for
            :func:`refresh_basis`.
        learning_rate: :math:`\eta`, a number or a schedule of the step. It is relative to S,
            whose trace is 1, so it does not depend on the gradient's scale: gradients of 1e-5
            are learned from as fast as those of 1. Measured on a subspace of rank 4 that
            rotates by 0.02 radians a step, under 5 % noise, the distortion is 1.005 times
            the least possible with 10 (default), 1.16 times with 1, 5.5 times with 0.1. With
            1e-5, a hundredth of a usual main learning rate, it is that of a frozen
            basis, 19.6 times.
        every: steps between two learning steps, an int or a schedule of the step.
        tied: one orthonormal matrix for projecting and lifting. False keeps an encoder V and
            a decoder U of its own, which starts as V; it takes twice the memory and
            follows a moving subspace at a distance, since V learns only from U: 2.5 times the
            least distortion in the measurement above.
        init: ``"gradient"`` (default), the leading subspace of the first gradient;
            ``"random"``; or what :func:`activation_basis` returns.
        side: the matrix side that bases live on, as for :func:`refresh_basis`.
        targets: which leaves are projected, as for :func:`refresh_basis`.
        dtype: dtype in which bases are stored. bfloat16 rounds small steps away.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments whose state is a
        :class:`TrackerState`; its ``refreshes`` count learning steps. It needs full gradients.

    Raises:
        TypeError: if ``rank``, ``every`` or ``learning_rate`` is no number of its kind.
        ValueError: if a value is out of range, or, at ``init``, if ``targets`` or ``init``
            does not fit params.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tracker = lro.learn_basis(rank=4)
        >>> params = {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32)}
        >>> state = tracker.init(params)
        >>> _, state = tracker.update(params, state)
        >>> state.reduction_basis["kernel"].shape
        (16, 4)

    References:
        Oja, `A simplified neuron model as a principal component analyzer
        <https://doi.org/10.1007/BF00275687>`_, 1982
    """
    check_rank(rank, "learn_basis: rank")
    _check_learning_rate(learning_rate)
    check_every(
        "learn_basis", every, 'for a basis that never changes use refresh_basis(method="frozen")'
    )
    check_choice("learn_basis: side", side, SIDES)
    if not isinstance(init, Mapping):
        check_choice("learn_basis: init", init, INITS)
    dtype = storage.check_dtype("learn_basis", dtype)
    tracking = Tracking(seed, needs_gradient="learn_basis")

    def start(plan: Plan) -> list[Bases]:
        if isinstance(init, Mapping):
            return _captured(plan, init, dtype)
        return random_start(plan, dtype)

    def step(form, side, basis, decoder, gradient, key, first, count):
        """One descent step, or at first the gradient's own subspace."""
        view, wide = form.view, wide_dtype(basis)

        def placed(x):
            return view.place_basis(x.astype(wide), side, gradient)

        noise = placed(find.random_directions(key, view, side, form.rank, wide))
        old, lifts = placed(basis), None if decoder is None else placed(decoder)
        rate = learning_rate(count) if callable(learning_rate) else learning_rate

        def learned():
            rate_now = jnp.asarray(rate, jnp.float32)
            return autoencoder.learned(gradient, view, side, old, lifts, noise, rate_now)

        def found():
            new = find.subspace_iteration(gradient, view, side, old, noise, find.COLD_ITERATIONS)
            return new, None if lifts is None else new

        return jax.lax.cond(first, found, learned) if init == "gradient" else learned()

    return make_tracker(
        tracking,
        lambda params: make_plan(params, targets, rank, side, tracking),
        start,
        step,
        Schedule(every, always=not callable(every) and every == 1),
        with_decoders=not tied,
    )
