"""What the inner optimizer remembers, carried from one basis to the next.

After a refresh, moments still speak the coordinates of the old basis. With
:math:`R = P_{new}^T P_{old}` a first moment becomes :math:`R m`, exactly what it would be had
the part of it inside both subspaces been gathered in the new one. A second moment has no exact
transform; the rule here treats each coordinate's variance as independent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import rebox, unbox
from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import dual, gram
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._inner import probe
from lowrank_optax._inner.roles import _FIRST, _SECOND, field_roles, map_moments
from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View

RULES = ("rotate", "keep", "reset")
Moments = str | Callable[[Any, dict[str, Bases]], Any]


def rotation(view: View, new: Bases, old: Bases, orthonormal: bool = True) -> Bases:
    """``R = P_newᵀ P_old`` for each side that has a basis, r by r.

    Of bases that are not orthonormal, ``R = V_newᵀ V_old (V_oldᵀ V_old)⁻¹``: the new core of
    what the old core says about the gradient. It is the identity where nothing changed.
    """
    batch_ndim = len(view.batch_axes)

    def one(new: Array | None, old: Array | None) -> Array | None:
        if new is None or old is None:
            return None
        old = old if orthonormal else dual(old, batch_ndim)
        return gram(new, old, batch_ndim)

    return Bases(one(new.reduction, old.reduction), one(new.output, old.output))


def rotate(view: View, rotations: Bases, core: Float[Array, "..."]) -> Float[Array, "..."]:
    """``R C``, ``C Rᵀ`` or both: a core in the coordinates of the new bases."""
    sides = [side for side in (REDUCTION, OUTPUT) if getattr(rotations, side) is not None]
    labels = "abcdefghijklmn"[: core.ndim]
    batch = labels[: len(view.batch_axes)]
    for side, axis in view.core_axes(sides).items():
        core = contract(
            f"{batch}z{labels[axis]},{labels}->{labels[:axis]}z{labels[axis + 1 :]}",
            getattr(rotations, side),
            core,
            precision=REFRESH_PRECISION,
        )
    return core


def rotate_second(
    view: View,
    rotations: Bases,
    second: Float[Array, "..."],
    first: Float[Array, "..."] | None,
    bias: Float[Array, ""] | float,
) -> Float[Array, "..."]:
    r"""A second moment in the coordinates of the new bases.

    .. math:: v' = \bigl|(R \circ R)(v - c\,m^2) + c\,(R m)^2\bigr|

    which is the rule :math:`|(R\circ R)(\hat v - \hat m^2) + (R\hat m)^2|` for the
    bias-corrected moments :math:`\hat m = m / w_1` and :math:`\hat v = v / w_2`, times
    :math:`w_2`, with :math:`c = w_2 / w_1^2`.

    Args:
        view: how the leaf is read as matrices.
        rotations: R of each projected side.
        second: v.
        first: m, or None for a moment without a mean, which then is 0.
        bias: c.

    References:
        Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient
        Statistics <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    squares = Bases(*(None if r is None else jnp.square(r) for r in rotations))
    if first is None:
        return jnp.abs(rotate(view, squares, second))
    variance = rotate(view, squares, second - bias * jnp.square(first))
    return jnp.abs(variance + bias * jnp.square(rotate(view, rotations, first)))


def _weight(path: str, field: str, count: Array, after_one: Any, after_two: Any) -> Array:
    """``1 - b**count``: the total weight that an average has given to past gradients."""
    one = tree.by_path(getattr(after_one, field)).get(path)
    two = tree.by_path(getattr(after_two, field)).get(path)
    if one is None or two is None or one.size != 1:
        return jnp.ones([])
    one, two = (x.reshape(()).astype(jnp.float32) for x in (one, two))
    share = 2 - two / one
    # An average of ones holds just 1 - b after a step, which keeps the digits that 1 - b has.
    share = jnp.where(jnp.abs(one - share) < 1e-5, one, share)
    weight = -jnp.expm1(count.astype(jnp.float32) * jnp.log1p(-share))
    return jnp.where(jnp.isfinite(weight) & (weight > 0), weight, 1.0)


def bias_ratio(node: Any, path: str, first: str, second: str, count: Array, *probed: Any) -> Array:
    count = getattr(node, "count", count)
    first_weight = _weight(path, first, count, *probed)
    second_weight = _weight(path, second, count, *probed)
    return second_weight / jnp.square(first_weight)


def _rotate_target(static: Any, rotations: Bases, refreshed: Array, firsts, seconds, bias):
    """The moments of one target in one state; ``static`` is its view and role names."""
    view, roles = static
    mean = next(iter(firsts.values()), None)
    wide = {name: x.astype(jnp.float32) for name, x in (firsts | seconds).items()}
    mean = None if mean is None else mean.astype(jnp.float32)
    moved = {name: rotate(view, rotations, wide[name]) for name in firsts}
    for name, role in roles:
        paired = mean if role == _SECOND else None
        moved[name] = rotate_second(view, rotations, wide[name], paired, bias)
    return {
        name: jnp.where(refreshed, place_like(moved[name].astype(old.dtype), old), old)
        for name, old in (firsts | seconds).items()
    }


class Change(NamedTuple):
    """A change of bases.

    Attributes:
        plan: what is projected.
        new: the bases of each target now.
        old: the bases before.
        refreshed: boolean, one a target: whether its bases changed.
    """

    plan: Plan
    new: Sequence[Bases]
    old: Sequence[Bases]
    refreshed: Array

    def rotations(self) -> list[Bases]:
        """R of each target."""
        views = [self.plan.leaves[index].view for index in self.plan.targets]
        triples = zip(views, self.new, self.old, strict=True)
        return [
            rotation(view, new, old, self.plan.orthonormal)
            for view, new, old in triples
            if view is not None
        ]


def _rotate_node(
    change: Change, rotations: Sequence[Bases], count: Array, node: Any, *probed: Any
) -> Any:
    """Rotates every recognised moment of one state NamedTuple."""
    roles = field_roles(node)
    leaves = {field: tree.by_path(getattr(node, field)) for field in roles}
    calls, places = [], []
    for number, index in enumerate(change.plan.targets):
        leaf = change.plan.leaves[index]
        here = {
            field: leaves[field][leaf.path]
            for field in roles
            if leaf.path in leaves[field] and leaves[field][leaf.path].shape == leaf.core_shape
        }
        firsts = {f: x for f, x in here.items() if roles[f] == _FIRST}
        seconds = {f: x for f, x in here.items() if roles[f] != _FIRST}
        paired = [f for f in seconds if roles[f] == _SECOND]
        bias = jnp.ones([])
        if firsts and paired:
            bias = bias_ratio(node, leaf.path, next(iter(firsts)), paired[0], count, *probed)
        if here:
            static = (leaf.view, tuple((f, roles[f]) for f in seconds))
            arguments = (rotations[number], change.refreshed[number], firsts, seconds, bias)
            calls.append((static, arguments))
            places.append(leaf.path)
    moved: dict[str, dict[str, Array]] = {field: {} for field in roles}
    for path, result in zip(places, map_sharing(_rotate_target, calls), strict=True):
        for field, value in result.items():
            moved[field][path] = value
    return node._replace(
        **{field: tree.with_leaves(getattr(node, field), moved[field]) for field in roles}
    )


def _reset(change: Change, inner_state: Any, fresh: Any) -> Any:
    """Puts everything that belongs to a refreshed target back to its initial value."""
    paths, leaves, treedef = tree.flatten_with_paths(inner_state)
    initial = tree.flatten(fresh)[0]
    for refreshed, index in zip(change.refreshed, change.plan.targets, strict=False):
        suffix = "/" + change.plan.leaves[index].path
        for place, path in enumerate(paths):
            if ("/" + path).endswith(suffix):
                old = unbox(leaves[place])
                start = place_like(unbox(initial[place]), old)
                leaves[place] = rebox(leaves[place], jnp.where(refreshed, start, old))
    return tree.unflatten(treedef, leaves)


def carry(
    rule: Moments,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: Any,
    cores: Any,
    change: Change,
    count: Array,
    extra_args: dict[str, Any],
) -> Any:
    """The inner state in the coordinates of the new bases.

    Args:
        rule: ``"rotate"``, ``"keep"``, ``"reset"`` or a callable
            ``(inner_state, {path: rotations}) -> inner_state``.
        inner: the inner optimizer.
        inner_state: its state, in the old coordinates.
        cores: the tree that it updates.
        change: the old and the new bases.
        count: int32 scalar, updates so far, where the inner state has no count of its own.
        extra_args: the extra arguments of this update.

    Returns:
        The inner state; what is not recognised as a moment is as it was.
    """
    if rule == "keep":
        return inner_state

    def carried():
        if rule == "reset":
            return _reset(change, inner_state, inner.init(jax.tree.map(jnp.zeros_like, cores)))
        rotations = change.rotations()
        if callable(rule):
            paths = [change.plan.leaves[index].path for index in change.plan.targets]
            return rule(inner_state, dict(zip(paths, rotations, strict=True)))
        probed = probe.decay_rates(inner, inner_state, cores, extra_args)

        def rotated(*nodes):
            return _rotate_node(change, rotations, count, *nodes)

        return map_moments(rotated, inner_state, *probed)

    return jax.lax.cond(jnp.any(change.refreshed), carried, lambda: inner_state)
