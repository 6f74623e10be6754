"""The tracker that recomputes bases now and then: ``refresh_basis``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowrank_optax import _subspace_methods, _target, _tree
from lowrank_optax._contract import explicit_spec, place_like, wide_dtype
from lowrank_optax._plan import Plan, make_plan
from lowrank_optax._state import TrackerState
from lowrank_optax._target import Rank, Targets
from lowrank_optax._view import OUTPUT, REDUCTION, Bases

Every = int | Callable[[jax.Array], Any]

_NEVER = np.iinfo(np.int32).max


def _check_every(every: Any) -> None:
    _target.check_static("refresh_basis: every", every)
    if callable(every):
        return
    if isinstance(every, bool) or not isinstance(every, int | np.integer):
        raise TypeError(
            f"refresh_basis: every must be an int or a schedule of the step, got {every!r}"
        )
    if every < 1:
        raise ValueError(
            f"refresh_basis: every={every} must be at least 1 step; for a basis that never "
            'changes use method="frozen"'
        )


def _initial_bases(
    plan: Plan, params: list[Any], treedef: Any, seed: int, dtype: jnp.dtype
) -> list[Any]:
    """Two trees of seeded random bases, for the reduction and for the output side."""
    # Compiled once per shape: an eager run would dispatch every small operation of each leaf.
    make = jax.jit(_subspace_methods.random_basis, static_argnums=(1, 2, 3, 4))
    wide = wide_dtype(dtype)
    trees = []
    for side in (REDUCTION, OUTPUT):
        leaves: list[Any] = [None] * len(plan.leaves)
        for number, index in enumerate(plan.targets):
            leaf = plan.leaves[index]
            if leaf.view is not None and side in leaf.sides:
                # Step -1, so that the start differs from what step 0 draws.
                key = _subspace_methods.leaf_key(seed, np.uint32(_NEVER), number)
                basis = make(key, leaf.view, side, leaf.rank, wide).astype(dtype)
                basis = leaf.view.place_basis(
                    basis, side, _tree.unbox(params[index]), spreading=True
                )
                axes = leaf.view.basis_axes(side)
                leaves[index] = _tree.rebox_part(params[index], basis, axes, explicit_spec(basis))
        trees.append(_tree.sparse_tree(treedef, leaves))
    return trees


def _check_not_compact(plan: Plan, gradients: list[Any]) -> None:
    for index in plan.targets:
        if isinstance(gradients[index], _tree.Compact):
            raise ValueError(
                f"{plan.leaves[index].path!r}: this gradient is compact, and its basis came "
                "beside it; pass it on: tx.update(grads, opt_state, params, bases=bases)"
            )


def refresh_basis(
    rank: Rank = 128,
    every: Every = 200,
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
        every: steps between two refreshes of a leaf, an int or a schedule of the step.
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
        dtype: dtype in which bases are stored.
        seed: seed of the random starts. No key is kept in the state.

    Returns:
        A gradient transformation with extra arguments whose state is a
        :class:`TrackerState`.

    Raises:
        TypeError: if ``rank`` or ``every`` is not a static number.
        ValueError: if a value is out of range, or, at ``init``, if ``targets`` fits no leaf.

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
    _target.check_rank(rank, "refresh_basis: rank")
    _check_every(every)
    _target.check_choice("refresh_basis: method", method, _subspace_methods.METHODS)
    _target.check_choice("refresh_basis: side", side, _target.SIDES)
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"refresh_basis: dtype={dtype.name} cannot hold a basis; use a float")

    def init_fn(params: Any) -> Any:
        plan = make_plan(params, targets, rank, side).tracked(method, seed)
        leaves, treedef = _tree.flatten(params)
        if leaves:
            reduction_basis, output_basis = _initial_bases(plan, leaves, treedef, seed, dtype)
        else:
            # An empty tree, or the placeholder of optax.tree_utils.tree_map_params.
            reduction_basis = output_basis = params
        counters = max(1, len(plan.targets))
        return TrackerState(
            plan=plan,
            tracker_count=jnp.zeros([], jnp.int32),
            next_refresh=jnp.zeros(counters, jnp.int32),
            refreshes=jnp.zeros(counters, jnp.int32),
            reduction_basis=reduction_basis,
            output_basis=output_basis,
        )

    def interval(count):
        return jnp.maximum(jnp.asarray(every(count) if callable(every) else every, jnp.int32), 1)

    def following(count, plan):
        """The next step at which each target is due, if it is refreshed now."""
        if method == "frozen":
            return jnp.full(len(plan.targets), _NEVER, jnp.int32)
        period = interval(count)
        offsets = jnp.zeros(len(plan.targets), jnp.int32)
        if stagger:
            # Target i of n waits for i * period // n steps; in parts, lest the product overflow.
            number, total = jnp.arange(len(plan.targets), dtype=jnp.int32), len(plan.targets)
            offsets = period // total * number + period % total * number // total
        # A refresh that had to be retried does not move the grid.
        return count + period - (count - offsets) % period

    def refresh_one(static, basis, gradient, key, first, due):
        """The new bases of one target, and whether it has them."""
        view, sides = static

        def refresh():
            bases = {side: getattr(basis, side) for side in sides}
            fresh = {
                side: _subspace_methods.new_basis(
                    method, gradient, view, side, old, jax.random.fold_in(key, number), first
                ).astype(old.dtype)
                for number, (side, old) in enumerate(bases.items())
            }
            usable = (method == "random") | _subspace_methods.is_usable(gradient)
            for new in fresh.values():
                usable &= jnp.all(jnp.isfinite(new))
            kept = {
                side: jnp.where(usable, place_like(fresh[side], old), old)
                for side, old in bases.items()
            }
            return Bases(**kept), usable

        return jax.lax.cond(due, refresh, lambda: (basis, jnp.zeros([], bool)))

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
                    _subspace_methods.leaf_key(seed, count, number),
                    state.refreshes[number] == 0,
                    due[number],
                )
                calls.append(((leaf.view, leaf.sides), arguments))
            results = _tree.map_sharing(refresh_one, calls)
            done = jnp.stack([done for _, done in results])
            return (
                [new for new, _ in results],
                jnp.where(done, following(count, plan), state.next_refresh),
                state.refreshes + done.astype(jnp.int32),
            )

        def keep():
            return bases, state.next_refresh, state.refreshes

        # One scalar predicate around everything: nothing is even read between refreshes.
        return jax.lax.cond(jnp.any(due), refresh, keep)

    def accept(plan, given, state):
        """Takes over bases that the backward pass refreshed."""
        paths = [plan.leaves[index].path for index in plan.targets]
        done = jnp.stack([given.refreshed[path] for path in paths])
        taken = []
        for path, old in zip(
            paths, plan.bases(state.reduction_basis, state.output_basis), strict=True
        ):
            new = given.bases[path]
            shapes = [[None if b is None else b.shape for b in bases] for bases in (new, old)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{path!r}: got bases of shapes {shapes[0]}, expected {shapes[1]}; compute "
                    "gradients with the opt_state that you update"
                )
            taken.append(jax.tree.map(place_like, new, old))
        return (
            taken,
            jnp.where(done, following(state.tracker_count, plan), state.next_refresh),
            state.refreshes + done.astype(jnp.int32),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, bases: Any = None, **extra_args: Any
    ) -> Any:
        del params, extra_args
        leaves, _ = _tree.flatten(updates)
        plan = state.plan
        if not plan.leaves:
            plan = make_plan(updates, targets, rank, side).tracked(method, seed)
        plan.check_count(leaves, "updates")
        count: Any = optax.safe_increment(state.tracker_count)
        if not plan.targets:
            return updates, state._replace(tracker_count=count, plan=plan)
        if bases is not None:
            current, next_refresh, refreshes = accept(plan, bases, state)
        else:
            gradients = [_tree.unbox(leaf) for leaf in leaves]
            _check_not_compact(plan, gradients)
            old = plan.bases(state.reduction_basis, state.output_basis)
            current, next_refresh, refreshes = refresh_all(plan, gradients, old, state)
        paths = [plan.leaves[index].path for index in plan.targets]
        reduction = {path: b.reduction for path, b in zip(paths, current, strict=True)}
        output = {path: b.output for path, b in zip(paths, current, strict=True)}
        return updates, TrackerState(
            plan=plan,
            tracker_count=count,
            next_refresh=next_refresh,
            refreshes=refreshes,
            reduction_basis=_tree.with_leaves(state.reduction_basis, reduction),
            output_basis=_tree.with_leaves(state.output_basis, output),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
