"""What the subspace left out, given back to the next gradient: ``error_feedback``."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import Leaf, rebox, unbox
from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.tree import OptState, Params, PyTree, Updates, find_states
from lowrank_optax._bases.gradient import Gradient
from lowrank_optax._bases.refresh import refresh_basis
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._checks import Rank, check_static
from lowrank_optax._inner.opened import opened
from lowrank_optax._inner.roles import FIRST
from lowrank_optax._inner.sites import mirrors, sites
from lowrank_optax._optimizers.adamw import plain_adamw
from lowrank_optax._optimizers.galore import galore_project
from lowrank_optax._plan.target import Targets
from lowrank_optax._subspace.state import SubspaceState


class ErrorFeedbackState(NamedTuple):
    """State of :func:`error_feedback`.

    Attributes:
        subspace_state: the state of the subspace optimizer.
        feedback: a tree parallel to params: the error of each target, of its shape;
            ``optax.MaskedNode()`` elsewhere.
    """

    subspace_state: PyTree
    feedback: PyTree


def _found(state: OptState) -> tuple[SubspaceState, TrackerState]:
    subspace = find_states(state, SubspaceState)
    trackers = [t for s in subspace for t in find_states(s.tracker_state, TrackerState)]
    if len(subspace) != 1 or len(trackers) != 1:
        raise ValueError(
            "error_feedback: give it one subspace optimizer, such as lro.galore_project(...), got "
            f"a transformation whose state holds {len(subspace)}"
        )
    return subspace[0], trackers[0]


def _first_moments(inner_state: PyTree, updates: PyTree) -> dict[str, Array]:
    """The average of gradients that the inner optimizer keeps of each weight, by path."""
    full = opened(inner_state)
    found: dict[str, Array] = {}
    for site in sites(full, mirrors(full, updates)):
        if site.role == FIRST and site.weight is not None:
            found.setdefault(site.weight, site.value)
    return found


def error_feedback(
    optimizer: optax.GradientTransformation, *, b1: float = 0.9, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    r"""Adds what was lost in earlier steps to each gradient: LDAdam's error feedback.

    .. math:: A_t = G_t + E_t, \qquad C_t = P_t^T A_t, \qquad
              E_{t+1} = (I - P_t P_t^T) A_t
                        + \tfrac{b_1}{1 - b_1}\,(I - P_t P_t^T) P_{t-1} m_{t-1}

    The subspace optimizer, its tracker included, sees :math:`A_t` in place of the gradient. The
    first term of the error is what the projection drops of it, the second what the moments lose
    when they are carried to the new basis.

    **It costs one buffer of the size of each target**, as much as ``optax.adamw``'s first moment,
    and thereby most of what a subspace saves. :func:`sketched_residual_lift` costs no state.

    Clip the gradient before, not inside: a clipped sum would lose what is to be kept. Full
    gradients are needed; compact ones are refused.

    Args:
        optimizer: one :func:`galore_project`, through any wrapper.
        b1: decay of the inner optimizer's first moment; 0 if it has none.
        dtype: dtype of the buffers.

    Returns:
        A gradient transformation with extra arguments; its state is an
        :class:`ErrorFeedbackState`.

    Raises:
        ValueError: if ``b1`` is not in [0, 1), or, at ``init``, if ``optimizer`` holds no subspace
            optimizer or several.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.error_feedback(
        ...     lro.galore_project(optax.adam(1e-3), lro.refresh_basis(rank=4, every=1))
        ... )
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> state = tx.init(params)
        >>> state.feedback["kernel"].shape
        (16, 32)

    References:
        Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient
        Statistics <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    check_static("error_feedback: b1", b1)
    if not 0 <= b1 < 1:
        raise ValueError(f"error_feedback: b1={b1} must be in [0, 1)")
    inner = optax.with_extra_args_support(optimizer)
    dtype = jnp.dtype(dtype)

    def init_fn(params: Params) -> OptState:
        subspace_state = inner.init(params)
        _, tracker = _found(subspace_state)
        leaves, treedef = tree.flatten(params)
        buffers: list[Leaf] = [None] * len(leaves)
        for projection in tracker.plan.projections:
            weight = unbox(leaves[projection.index])
            buffers[projection.index] = place_like(jnp.zeros(weight.shape, dtype), weight)
        return ErrorFeedbackState(subspace_state, tree.sparse_tree(treedef, buffers))

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, OptState]:
        subspace, before = _found(state.subspace_state)
        projections = before.plan.projections
        moments = _first_moments(subspace.inner_state, updates)
        errors = tree.by_path(state.feedback)
        boxes, treedef = tree.flatten(updates)
        before.plan.check_count(boxes, "updates")
        totals = list(boxes)
        for p in projections:
            gradient = Gradient(p, unbox(boxes[p.index])).full("error_feedback")
            wide = wide_dtype(gradient, errors[p.path])
            total = gradient.astype(wide) + errors[p.path].astype(wide)
            totals[p.index] = rebox(boxes[p.index], total)
        results, subspace_state = inner.update(
            tree.unflatten(treedef, totals), state.subspace_state, params, **extra_args
        )
        _, after = _found(subspace_state)
        fresh = {}
        for p, new, old in zip(projections, after.encoders(), before.encoders(), strict=True):
            kept = unbox(totals[p.index])
            if b1 > 0 and p.path in moments and moments[p.path].shape == p.core_shape:
                momentum = p.view.lift(moments[p.path].astype(kept.dtype), old)
                kept = kept + b1 / (1 - b1) * momentum
            lost = kept - p.view.lift(p.view.project(kept, new), new)
            # One bad gradient must not stay for good.
            lost = jnp.where(jnp.all(jnp.isfinite(lost)), lost, 0)
            fresh[p.path] = place_like(lost.astype(dtype), errors[p.path])
        return results, ErrorFeedbackState(subspace_state, tree.with_leaves(state.feedback, fresh))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def ldadamw(
    learning_rate: optax.ScalarOrSchedule,
    rank: Rank = 128,
    scale: jax.typing.ArrayLike = 1.0,
    b1: float = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    targets: Targets = None,
    *,
    side: str = "smaller",
    mask: Any = None,
    mu_dtype: Any = None,
    metrics: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW in a subspace that follows the gradient at every step, with error feedback: LDAdam.

    One subspace iteration a step, moments carried over by ``"rotate"``, and what is lost added to
    the next gradient by :func:`error_feedback`, which **costs one full-sized buffer a target**. The
    paper's subspace follows a mixture of gradient and momentum, here it follows the gradient
    with its feedback.

    Args:
        learning_rate: a number or a schedule of the step.
        rank: columns of each basis, or a fraction of each matrix's smaller side.
        scale: factor on projected updates.
        b1: as for :func:`galore_adamw`, like everything else that is not said here. A Python
            number, since the feedback of the momentum depends on it.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, on the whole weight.
        targets: which leaves are projected.
        side: the matrix side that bases live on.
        mask: which leaves decay.
        mu_dtype: dtype of the first moment.
        metrics: keep fidelity metrics in the state.
        seed: seed of the random starts.

    Returns:
        A gradient transformation with extra arguments. It needs full gradients.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> tx = lro.ldadamw(1e-3, rank=4)
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient
        Statistics <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    subspace = galore_project(
        plain_adamw(learning_rate, b1, b2, eps, weight_decay, mask, mu_dtype),
        refresh_basis(rank, 1, side=side, targets=targets, seed=seed),
        scale=scale,
        metrics=metrics,
    )
    return error_feedback(subspace, b1=b1)
