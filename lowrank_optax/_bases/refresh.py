"""The tracker that recomputes bases now and then: ``refresh_basis``."""

from typing import Any

import jax.numpy as jnp
import optax

from lowrank_optax._arrays.tree import Params
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.schedule import AdaptiveEvery, Every, Schedule, check_every
from lowrank_optax._bases.tracker import make_tracker, random_start
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import Plan, Tracking
from lowrank_optax._plan.target import SIDES, Targets


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
    check_every("refresh_basis", shortest, 'for a basis that never changes use method="frozen"')
    check_choice("refresh_basis: method", method, find.METHODS)
    check_choice("refresh_basis: side", side, SIDES)
    dtype = storage.check_dtype("refresh_basis", dtype, integers=True)
    tracking = Tracking(
        seed,
        iterates=method in ("subspace", "frozen"),
        needs_gradient=f"refresh_basis(method={method!r})" if method in ("svd", "gram") else "",
        frozen=method == "frozen",
    )

    def plan_of(params: Params) -> Plan:
        plan = make_plan(params, targets, rank, side, tracking)
        for projection in plan.projections:
            storage.check_rank(projection.path, projection.rank, dtype)
        return plan

    def step(form, side, basis, decoder, gradient, key, first, count):
        """The new basis, whatever the step: it depends on this gradient or draw alone."""
        del count
        return find.new_basis(method, gradient, form.view, side, basis, key, first), decoder

    return make_tracker(
        tracking,
        plan_of,
        lambda plan: random_start(plan, dtype),
        step,
        Schedule(shortest, stagger, adaptive, once=method == "frozen"),
    )
