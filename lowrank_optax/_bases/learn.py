"""The tracker that learns bases a little at every step: ``learn_basis``."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import orthonormalize
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._bases import autoencoder, find, storage, tracker
from lowrank_optax._bases.tracker import Every
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._plan import target
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.target import Targets
from lowrank_optax._plan.view import Bases

INITS = ("gradient", "random")
# Measured on rotating subspaces of rank 4 and 16, under 5 to 100 % noise: less falls behind, and
# more hardly lowers the distortion of this gradient but raises that of the next one.
LEARNING_RATE = 10.0


def _check_learning_rate(rate: Any) -> None:
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        if not 0 <= rate < float("inf"):
            raise ValueError(f"learn_basis: learning_rate={rate} must be finite and not negative")
    elif not callable(rate) and not hasattr(rate, "dtype"):
        raise TypeError(
            "learn_basis: learning_rate must be a number or a schedule of the step, got "
            f"{rate!r}; for a share of the main one write learning_rate=lambda t: schedule(t) / 100"
        )


def _captured(plan: Plan, captured: Mapping[str, Any], seed: int, dtype: Any) -> list[Bases]:
    """The leading columns of given bases, one entry a target, orthonormal."""

    def one(leaf: LeafPlan, side: str, number: int) -> jax.Array:
        assert leaf.view is not None
        basis = getattr(captured.get(leaf.path), side, None)
        expected = leaf.view.basis_shape(side, leaf.rank)
        found = None if basis is None else tuple(basis.shape)
        if found is None or found[:-1] != expected[:-1] or found[-1] < leaf.rank:
            raise ValueError(
                f"{leaf.path!r}: init has {'no basis' if found is None else f'shape {found}'} for "
                f"its {side} side, expected shape {expected}; capture with this tracker's rank, "
                "side and targets: lro.activation_basis(loss_fn, params, batches, rank=..., "
                "side=..., targets=...)"
            )
        wide = wide_dtype(dtype)
        key = find.leaf_key(seed, 0, number)
        fill = find.random_directions(key, leaf.view, side, leaf.rank, wide)
        columns = jnp.asarray(basis)[..., : leaf.rank].astype(wide)
        return orthonormalize(columns, fill, len(leaf.view.batch_axes)).astype(dtype)

    return [
        Bases(**{side: one(plan.leaves[index], side, number) for side in plan.leaves[index].sides})
        for number, index in enumerate(plan.targets)
    ]


def learn_basis(
    rank: Rank = 32,
    *,
    learning_rate: optax.ScalarOrSchedule = LEARNING_RATE,
    every: Every = 1,
    tied: bool = True,
    normalize: str = "qr",
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
        normalize: ``"qr"`` (default), orthonormal columns after each step, by CholeskyQR on
            the r by r Gram matrix; ``"columns"``, columns of norm 1, which alone does
            not make ‖G̃‖ ≈ ‖G‖; ``"none"``, whatever descent makes of them.
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
    tracker.check_every(
        "learn_basis", every, 'for a basis that never changes use refresh_basis(method="frozen")'
    )
    check_choice("learn_basis: normalize", normalize, autoencoder.NORMALIZATIONS)
    check_choice("learn_basis: side", side, target.SIDES)
    if not isinstance(init, Mapping):
        check_choice("learn_basis: init", init, INITS)
    dtype = storage.check_dtype("learn_basis", dtype)
    always = not callable(every) and every == 1

    def plan_of(params: Any) -> Plan:
        return make_plan(params, targets, rank, side).tracked(f"learn_{normalize}", seed)

    def init_fn(params: Any) -> Any:
        plan = plan_of(params)
        if isinstance(init, Mapping):
            start = _captured(plan, init, seed, dtype)
        else:
            start = tracker.random_start(plan, seed, dtype)
        state = tracker.start_state(plan, params, start)
        if tied:
            return state
        # Two trees of arrays of their own, since a donated buffer may be given only once.
        decoders = jax.tree.map(jnp.copy, (state.reduction_basis, state.output_basis))
        return state._replace(reduction_decoder=decoders[0], output_decoder=decoders[1])

    def stepped(view, side, gradient, encoder, decoder, noise, rate):
        """The normalised encoder and decoder of one side after one step; no decoder if tied."""
        batch_ndim = len(view.batch_axes)
        if decoder is None:
            new = autoencoder.tied_step(gradient, view, side, encoder, rate)
            return autoencoder.normalized(normalize, new, noise, batch_ndim), None
        pair = autoencoder.untied_step(gradient, view, side, encoder, decoder, rate)
        return tuple(autoencoder.normalized(normalize, new, noise, batch_ndim) for new in pair)

    def learn_side(view, side, gradient, encoder, decoder, key, first, rate):
        wide = wide_dtype(encoder)

        def placed(x):
            return view.place_basis(x.astype(wide), side, gradient)

        noise = find.random_directions(key, view, side, encoder.shape[-1], wide)
        noise, old = placed(noise), placed(encoder)
        lift = None if decoder is None else placed(decoder)

        def learned():
            return stepped(view, side, gradient, old, lift, noise, rate)

        def found():
            new = find.subspace_iteration(gradient, view, side, old, noise, find.COLD_ITERATIONS)
            return new, None if lift is None else new

        return jax.lax.cond(first, found, learned) if init == "gradient" else learned()

    def learn_one(static, encoders, decoders, gradient, key, first, due, rate):
        """The new bases and decoders of one target, and whether it has them."""
        view, sides = static

        def learn():
            new = Bases(), Bases()
            for number, side in enumerate(sides):
                pair = learn_side(
                    view,
                    side,
                    gradient,
                    getattr(encoders, side),
                    getattr(decoders, side),
                    jax.random.fold_in(key, number),
                    first,
                    rate,
                )
                new = tuple(b._replace(**{side: x}) for b, x in zip(new, pair, strict=True))
            usable = find.is_usable(gradient)
            for x in jax.tree.leaves(new):
                usable &= jnp.all(jnp.isfinite(x))

            def choose(old, fresh):
                return jnp.where(usable, place_like(fresh.astype(old.dtype), old), old)

            return jax.tree.map(choose, (encoders, decoders), new), usable

        if always:
            return learn()
        return jax.lax.cond(due, learn, lambda: ((encoders, decoders), jnp.zeros([], bool)))

    def learn_all(plan, gradients, state):
        count = state.tracker_count
        due = count >= state.next_refresh
        rate = jnp.asarray(
            learning_rate(count) if callable(learning_rate) else learning_rate, jnp.float32
        )
        encoders = state.encoders()
        decoders = [Bases()] * len(encoders) if tied else state.decoders()

        def learn():
            calls = []
            for number, index in enumerate(plan.targets):
                leaf = plan.leaves[index]
                arguments = (
                    encoders[number],
                    decoders[number],
                    gradients[index],
                    find.leaf_key(seed, count, number),
                    state.refreshes[number] == 0,
                    due[number],
                    rate,
                )
                calls.append(((leaf.view, leaf.sides), arguments))
            results = map_sharing(learn_one, calls)
            done = jnp.stack([done for _, done in results])
            period = tracker.interval(every, count)
            return (
                [new for new, _ in results],
                jnp.where(done, count + period - count % period, state.next_refresh),
                state.refreshes + done.astype(jnp.int32),
            )

        def keep():
            return list(zip(encoders, decoders, strict=True)), state.next_refresh, state.refreshes

        return learn() if always else jax.lax.cond(jnp.any(due), learn, keep)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del params, extra_args
        leaves, _ = tree.flatten(updates)
        plan = state.plan if state.plan.leaves else plan_of(updates)
        plan.check_count(leaves, "updates")
        count: Any = optax.safe_increment(state.tracker_count)
        if not plan.targets:
            return updates, state._replace(tracker_count=count, plan=plan)
        gradients = [unbox(leaf) for leaf in leaves]
        _check_full(plan, gradients)
        pairs, next_refresh, refreshes = learn_all(plan, gradients, state)
        reduction, output = tracker.with_bases(
            plan, state.reduction_basis, state.output_basis, [new for new, _ in pairs]
        )
        decoders = (None, None)
        if not tied:
            decoders = tracker.with_bases(
                plan, state.reduction_decoder, state.output_decoder, [new for _, new in pairs]
            )
        return updates, state._replace(
            plan=plan,
            tracker_count=count,
            next_refresh=next_refresh,
            refreshes=refreshes,
            reduction_basis=reduction,
            output_basis=output,
            reduction_decoder=decoders[0],
            output_decoder=decoders[1],
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_full(plan: Plan, gradients: Sequence[Any]) -> None:
    for index in plan.targets:
        if isinstance(gradients[index], Compact):
            raise ValueError(
                f"{plan.leaves[index].path!r}: learn_basis needs the full gradient, got a compact "
                "one; use jax.value_and_grad, or track with lro.refresh_basis(...)"
            )
