"""The tracker that recomputes bases now and then: ``refresh_basis``."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._bases import find, storage, tracker
from lowrank_optax._bases.adaptive import AdaptiveEvery, subspace_overlap
from lowrank_optax._bases.tracker import NEVER, Every
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._plan import target
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.target import Targets
from lowrank_optax._plan.view import Bases


def _check_not_compact(plan: Plan, gradients: list[Any]) -> None:
    for index in plan.targets:
        if isinstance(gradients[index], Compact):
            raise ValueError(
                f"{plan.leaves[index].path!r}: this gradient is compact, and its basis came "
                "beside it; pass it on: tx.update(grads, opt_state, params, bases=bases)"
            )


def _check_same_shapes(path: str, given: Bases, stored: Bases) -> None:
    got, expected = ([None if b is None else b.shape for b in x] for x in (given, stored))
    if got != expected:
        raise ValueError(
            f"{path!r}: got bases of shapes {got}, expected {expected}; compute gradients with the "
            "opt_state that you update"
        )


def refresh_basis(
    rank: Rank = 128,
    every: Every | AdaptiveEvery = 200,
    *,
    method: str = "subspace",
    side: str = "smaller",
    targets: Targets = None,
    stagger: bool = False,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a basis of each gradient's leading subspace, recomputed now and then.

    A tracker: updates pass through unchanged, and the state holds, for every target, an
    orthonormal :math:`P` with

    .. math:: P_t = \mathrm{leading}_r(G_t) \text{ if } t \bmod \mathrm{every} = 0,
              \text{ else } P_{t-1}

    Give it to :func:`galore_project` as ``basis``, or put it in a chain to watch.

    A refresh that sees a gradient with a NaN, an infinity or only zeros keeps the old basis
    and tries again at the next step. Bases are finite and orthonormal at all times.

    Args:
        rank: columns of each basis, an int; or a float in (0, 1], a fraction of each
            matrix's smaller side. A leaf whose rank reaches its smaller side is trained
            full-rank and stores no basis.
        every: steps between two refreshes of a leaf, an int, a schedule of the step, or
            :func:`adaptive_every`.
        method: ``"subspace"`` (default), warm-started block subspace iteration;
            ``"svd"``, the exact singular vectors, slow; ``"gram"``, the eigenvectors of
            the smaller Gram matrix; ``"random"``, a fresh random subspace at each
            refresh; ``"frozen"``, found once as by ``"subspace"``.
        side: the matrix side that bases live on: ``"smaller"`` (default; the reduction
            side where both are equal), ``"larger"``, ``"reduction"``, ``"output"``, or
            ``"both"`` for two-sided cores ``PᵀGQ`` of r by r.
        targets: which leaves are projected: None for matrices of linear layers; a list of
            ``(regex on the path, rank | Target | None)`` of which the first match decides;
            a pytree of ``Target | None``; or a callable ``(path, leaf) -> Target | None``.
        stagger: spread the refreshes of different leaves over the interval, so that no
            step pays for all. The first refresh is common.
        dtype: dtype in which bases are stored: a float; or ``jnp.int8``, a quarter of
            float32's bytes, with columns about 1 % off; or ``jnp.int4``, an eighth, two columns
            in each ``uint8``, with columns about 11 % off. Integers leave columns normalised
            but not quite orthogonal.
        seed: seed of the random starts. No key is kept in the state.

    Returns:
        A gradient transformation with extra arguments whose state is a
        :class:`TrackerState`.

    Raises:
        TypeError: if ``rank`` or ``every`` is not a static number.
        ValueError: if a value is out of range, or, at ``init``, if ``targets`` fits no leaf or
            ``dtype=jnp.int4`` meets an odd rank.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tracker = lro.refresh_basis(rank=4, every=100)
        >>> params = {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32)}
        >>> state = tracker.init(params)
        >>> state.reduction_basis["kernel"].shape
        (16, 4)

    References:
        Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
        <https://arxiv.org/abs/2403.03507>`_, 2024
    """
    check_rank(rank, "refresh_basis: rank")
    adaptive = every if isinstance(every, AdaptiveEvery) else None
    shortest = every.initial if isinstance(every, AdaptiveEvery) else every
    tracker.check_every(
        "refresh_basis", shortest, 'for a basis that never changes use method="frozen"'
    )
    check_choice("refresh_basis: method", method, find.METHODS)
    check_choice("refresh_basis: side", side, target.SIDES)
    dtype = storage.check_dtype("refresh_basis", dtype, integers=True)

    def init_fn(params: Any) -> Any:
        plan = make_plan(params, targets, rank, side).tracked(method, seed)
        for leaf in (plan.leaves[index] for index in plan.targets):
            storage.check_rank(leaf.path, leaf.rank, dtype)
        state = tracker.start_state(plan, params, tracker.random_start(plan, seed, dtype))
        if adaptive is None:
            return state
        return state._replace(intervals=jnp.full_like(state.refreshes, adaptive.initial))

    def following(count, plan, intervals, first):
        """The next step at which each target is due, if it is refreshed now."""
        if method == "frozen":
            return jnp.full(len(plan.targets), NEVER, jnp.int32)
        period = tracker.interval(shortest, count)
        offsets = jnp.zeros(len(plan.targets), jnp.int32)
        if stagger:
            # Target i of n waits for i * period // n steps; in parts, lest the product overflow.
            number, total = jnp.arange(len(plan.targets), dtype=jnp.int32), len(plan.targets)
            offsets = period // total * number + period % total * number // total
        if adaptive is not None:
            return count + intervals + jnp.where(first, offsets, 0)
        # A refresh that had to be retried does not move the grid.
        return count + period - (count - offsets) % period

    def refresh_one(static, basis, gradient, key, first, due):
        """The new bases of one target as stored, and whether it has them."""
        view, sides = static

        def refresh():
            bases = {side: getattr(basis, side) for side in sides}
            fresh = {
                side: find.new_basis(
                    method,
                    gradient,
                    view,
                    side,
                    storage.read(old, view),
                    jax.random.fold_in(key, number),
                    first,
                )
                for number, (side, old) in enumerate(bases.items())
            }
            usable = (method == "random") | find.is_usable(gradient)
            for new in fresh.values():
                usable &= jnp.all(jnp.isfinite(new))
            kept = {
                side: jnp.where(
                    usable, place_like(storage.store(fresh[side], view, old.dtype), old), old
                )
                for side, old in bases.items()
            }
            return Bases(**kept), usable

        return jax.lax.cond(due, refresh, lambda: (basis, jnp.zeros([], bool)))

    def overlap(view, new, old):
        return subspace_overlap(view, storage.read_all(new, view), storage.read_all(old, view))

    def scheduled(plan, new, old, done, state):
        """The counters after the targets of ``done`` got new bases."""
        intervals, first = state.intervals, state.refreshes == 0
        if adaptive is not None:
            calls = [
                (plan.leaves[index].view, pair)
                for index, pair in zip(plan.targets, zip(new, old, strict=True), strict=True)
            ]
            overlaps = jnp.stack(map_sharing(overlap, calls))
            intervals = jnp.where(done, adaptive.following(intervals, overlaps, first), intervals)
        due = following(state.tracker_count, plan, intervals, first)
        next_refresh = jnp.where(done, due, state.next_refresh)
        return next_refresh, state.refreshes + done.astype(jnp.int32), intervals

    def unscheduled(state):
        return state.next_refresh, state.refreshes, state.intervals

    def refresh_all(plan, gradients, bases, state):
        count = state.tracker_count
        due = count >= state.next_refresh

        def refresh():
            calls = []
            for number, index in enumerate(plan.targets):
                leaf = plan.leaves[index]
                arguments = (
                    bases[number],
                    gradients[index],
                    find.leaf_key(seed, count, number),
                    state.refreshes[number] == 0,
                    due[number],
                )
                calls.append(((leaf.view, leaf.sides), arguments))
            results = map_sharing(refresh_one, calls)
            new, done = [new for new, _ in results], jnp.stack([done for _, done in results])
            return new, scheduled(plan, new, bases, done, state)

        # One scalar predicate around everything: nothing is even read between refreshes.
        return jax.lax.cond(jnp.any(due), refresh, lambda: (bases, unscheduled(state)))

    def accept(plan, given, old, state):
        """Takes over bases that the backward pass refreshed."""
        paths = [plan.leaves[index].path for index in plan.targets]
        for path, kept in zip(paths, old, strict=True):
            _check_same_shapes(path, given.bases[path], kept)
        new = [
            jax.tree.map(place_like, given.bases[path], kept)
            for path, kept in zip(paths, old, strict=True)
        ]
        done = jnp.stack([given.refreshed[path] for path in paths])
        counters = jax.lax.cond(
            jnp.any(done),
            lambda: scheduled(plan, new, old, done, state),
            lambda: unscheduled(state),
        )
        return new, counters

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, bases: Any = None, **extra_args: Any
    ) -> Any:
        del params, extra_args
        leaves, _ = tree.flatten(updates)
        plan = state.plan
        if not plan.leaves:
            plan = make_plan(updates, targets, rank, side).tracked(method, seed)
        plan.check_count(leaves, "updates")
        count: Any = optax.safe_increment(state.tracker_count)
        if not plan.targets:
            return updates, state._replace(tracker_count=count, plan=plan)
        old = state.stored()
        if bases is not None:
            current, counters = accept(plan, bases, old, state)
        else:
            gradients = [unbox(leaf) for leaf in leaves]
            _check_not_compact(plan, gradients)
            current, counters = refresh_all(plan, gradients, old, state)
        next_refresh, refreshes, intervals = counters
        reduction_basis, output_basis = tracker.with_bases(
            plan, state.reduction_basis, state.output_basis, current
        )
        return updates, state._replace(
            plan=plan,
            tracker_count=count,
            next_refresh=next_refresh,
            refreshes=refreshes,
            reduction_basis=reduction_basis,
            output_basis=output_basis,
            intervals=intervals,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
