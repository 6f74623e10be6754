"""What every tracker is: a transformation that passes updates through and keeps bases in its state.

:func:`make_tracker` is all of it but one thing: how the basis of one side moves, given a gradient.
That is the *step*, which :func:`refresh_basis` and :func:`learn_basis` bring.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._arrays.tree import OptState, Params, PyTree, Updates
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.gradient import Gradient
from lowrank_optax._bases.schedule import NEVER, Counters, Schedule, subspace_overlap
from lowrank_optax._bases.state import TrackerState, start_state
from lowrank_optax._plan.plan import Plan, Projection, Tracking
from lowrank_optax._plan.view import Bases

Step = Callable[
    [Projection, str, Array, Array | None, Array, Array, Array, Array], tuple[Array, Array | None]
]
"""From a target's form, one of its sides, the basis and the decoder of that side (None where the
basis lifts too), the gradient, a PRNG key, whether the basis is still that of ``init``, and the
step count, to the new basis and decoder."""


_Stored = tuple[Bases, Bases]


def random_start(plan: Plan, dtype: jnp.dtype) -> list[Bases]:
    """Seeded random bases as they are stored, one entry a target."""
    # Compiled once per shape: an eager run would dispatch every small operation of each leaf.
    make = jax.jit(find.random_basis, static_argnums=(1, 2, 3, 4))
    start = []
    for projection in plan.projections:
        # Step -1, so that the start differs from what step 0 draws.
        key = find.leaf_key(plan.tracking.seed, np.uint32(NEVER), projection.number)
        view, rank = projection.view, projection.rank
        sides = {side: make(key, view, side, rank, wide_dtype(dtype)) for side in projection.sides}
        start.append(Bases(**{s: storage.store(b, view, dtype) for s, b in sides.items()}))
    return start


@dataclasses.dataclass(frozen=True)
class _Follower:
    """Moves the bases of targets, as they are stored.

    What is stored of a target is a pair: its bases, and the matrices that lift where these are not
    the bases, else empty.

    Attributes:
        tracking: the static facts of the tracker.
        step: moves one basis.
        schedule: when bases move.
    """

    tracking: Tracking
    step: Step
    schedule: Schedule

    def one(
        self,
        form: Projection,
        old: _Stored,
        gradient: Float[Array, "..."],
        key: Array,
        first: Bool[Array, ""],
        due: Bool[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[_Stored, Bool[Array, ""]]:
        """One target after a step, and whether its bases are new."""

        def moved() -> tuple[_Stored, Array]:
            bases, decoders = Bases(), Bases()
            for number, side in enumerate(form.sides):
                basis = storage.read(old[0].on(side), form.view)
                here = jax.random.fold_in(key, number)
                new, lifts = self.step(
                    form, side, basis, old[1].on(side), gradient, here, first, count
                )
                bases = bases._replace(**{side: new})
                decoders = decoders._replace(**{side: lifts})
            usable = all_finite((bases, decoders))
            if self.tracking.reads_gradient:
                usable &= find.is_usable(gradient)

            def choose(fresh: Array, stored: Array) -> Array:
                fresh = storage.store(fresh, form.view, stored.dtype)
                return jnp.where(usable, place_like(fresh, stored), stored)

            return jax.tree.map(choose, (bases, decoders), old), usable

        if self.schedule.always:
            return moved()
        return jax.lax.cond(due, moved, lambda: (old, jnp.zeros([], bool)))

    def all(
        self, state: TrackerState, gradients: Sequence[Array], old: Sequence[_Stored]
    ) -> tuple[list[_Stored], Counters]:
        """Every target after a step, and the counters."""
        count, counters, plan = state.tracker_count, Counters.of(state), state.plan
        due = count >= state.next_refresh

        def moved() -> tuple[list[_Stored], Counters]:
            calls = []
            for projection, gradient in zip(plan.projections, gradients, strict=True):
                number = projection.number
                key = find.leaf_key(plan.tracking.seed, count, number)
                first = state.refreshes[number] == 0
                arguments = (old[number], gradient, key, first, due[number], count)
                calls.append((projection.form, arguments))
            results = map_sharing(self.one, calls)
            new, done = [new for new, _ in results], jnp.stack([done for _, done in results])
            return new, self.schedule.after(count, done, counters, self._overlaps(plan, new, old))

        if self.schedule.always:
            return moved()
        # One scalar predicate around everything: nothing is even read between refreshes.
        return jax.lax.cond(jnp.any(due), moved, lambda: (list(old), counters))

    def accepted(
        self, state: TrackerState, given: Any, old: Sequence[_Stored]
    ) -> tuple[list[_Stored], Counters]:
        """Every target with the bases that a backward pass moved, and the counters."""
        plan, counters = state.plan, Counters.of(state)
        new = [
            (_accepted(projection.path, given.bases.get(projection.path), bases), decoders)
            for projection, (bases, decoders) in zip(plan.projections, old, strict=True)
        ]
        done = jnp.stack([given.refreshed[projection.path] for projection in plan.projections])

        def counted() -> Counters:
            overlaps = self._overlaps(plan, new, old)
            return self.schedule.after(state.tracker_count, done, counters, overlaps)

        return new, jax.lax.cond(jnp.any(done), counted, lambda: counters)

    def _overlaps(
        self, plan: Plan, new: Sequence[_Stored], old: Sequence[_Stored]
    ) -> Float[Array, "targets"] | None:
        """How much of each subspace stayed, where the schedule asks."""
        if self.schedule.adaptive is None:
            return None

        def overlap(form: Projection, *bases: Bases) -> Array:
            return subspace_overlap(form.view, *(storage.read_all(b, form.view) for b in bases))

        pairs = [(after[0], before[0]) for after, before in zip(new, old, strict=True)]
        forms = [projection.form for projection in plan.projections]
        return jnp.stack(map_sharing(overlap, list(zip(forms, pairs, strict=True))))


def make_tracker(
    tracking: Tracking,
    plan_of: Callable[[Any], Plan],
    start: Callable[[Plan], Sequence[Bases]],
    step: Step,
    schedule: Schedule,
    *,
    with_decoders: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """A tracker.

    Args:
        tracking: the static facts of it.
        plan_of: decides what is projected in a params tree.
        start: makes the bases of ``init`` as they are stored.
        step: moves one basis.
        schedule: when bases move.
        with_decoders: whether matrices of their own lift, which start as the bases.

    Returns:
        The transformation; its state is a :class:`TrackerState`.
    """
    follow = _Follower(tracking, step, schedule)

    def init_fn(params: Params) -> OptState:
        plan = plan_of(params)
        state = schedule.started(start_state(plan, params, start(plan)))
        if not with_decoders:
            return state
        # Two trees of arrays of their own, since a donated buffer may be given only once.
        reduction, output = jax.tree.map(jnp.copy, (state.reduction_basis, state.output_basis))
        return state._replace(reduction_decoder=reduction, output_decoder=output)

    def update_fn(
        updates: Updates,
        state: OptState,
        params: Params | None = None,
        *,
        bases: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, OptState]:
        del params, extra_args
        plan, (leaves, _) = state.plan, tree.flatten(updates)
        plan.check_count(leaves, "updates")
        count = optax.safe_increment(state.tracker_count)
        if not plan.projections:
            return updates, state._replace(tracker_count=count)
        old = list(zip(state.stored(), state.stored_decoders(), strict=True))
        if bases is None or tracking.needs_gradient:
            gradients = [Gradient(p, unbox(leaves[p.index])) for p in plan.projections]
            full = [_full(tracking, gradient) for gradient in gradients]
            new, counters = follow.all(state, full, old)
        else:
            new, counters = follow.accepted(state, bases, old)
        state = state.with_bases([b for b, _ in new], [d for _, d in new])
        return updates, state._replace(tracker_count=count, **counters._asdict())

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def all_finite(arrays: PyTree) -> Bool[Array, ""]:
    """Whether every entry of every array of a tree is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(arrays)]))


def _full(tracking: Tracking, gradient: Gradient) -> Array:
    if not gradient.is_full and not tracking.needs_gradient:
        raise ValueError(
            f"{gradient.projection.path!r}: this gradient is compact, and its basis came "
            "beside it; pass it on: tx.update(grads, opt_state, params, bases=bases)"
        )
    return gradient.full(tracking.needs_gradient)


def _accepted(path: str, given: Bases | None, stored: Bases) -> Bases:
    if given is None:
        raise ValueError(
            f"{path!r}: got no bases for it; compute gradients with the opt_state that you update"
        )
    got, expected = ([None if b is None else b.shape for b in x] for x in (given, stored))
    if got != expected:
        raise ValueError(
            f"{path!r}: got bases of shapes {got}, expected {expected}; compute gradients with the "
            "opt_state that you update"
        )
    return jax.tree.map(place_like, given, stored)
