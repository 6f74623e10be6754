"""What the inner optimizer remembers, carried from one basis to the next.

After a refresh, moments still speak the coordinates of the old basis. With
:math:`R = P_{new}^T P_{old}` a first moment becomes :math:`R m`, exactly what it would be had
the part of it inside both subspaces been gathered in the new one. A second moment has no exact
transform; the rule here treats each coordinate's variance as independent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from lowrank_optax._arrays.boxes import rebox, unbox
from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.orthonormal import gram
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._arrays.tree import OptState, PyTree, flatten, unflatten
from lowrank_optax._inner.opened import map_opened
from lowrank_optax._inner.probe import decay_rates
from lowrank_optax._inner.roles import FIRST, SECOND, field_names
from lowrank_optax._inner.sites import Keys, Site, mirrors, sites
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View

# Of one array after one and after two steps; None where there is none.
Pair = tuple[Array | None, Array | None]

RULES = ("rotate", "keep", "reset")
Moments = str | Callable[[Any, dict[str, Bases]], Any]


def rotation(view: View, new: Bases, old: Bases) -> Bases:
    """``R = P_newᵀ P_old`` for each side that has a basis, r by r."""
    pairs = zip(new, old, strict=True)
    batch_ndim = len(view.batch_axes)
    return Bases(*(None if p is None or q is None else gram(p, q, batch_ndim) for p, q in pairs))


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


def _weight(count: Array, one: Array | None, two: Array | None) -> Array:
    r"""``1 - b**count``: the total weight that an average has given to past gradients.

    Of the gradient 1, a fresh average holds :math:`m_1 = 1 - b` after one step and
    :math:`m_2 = b\,m_1 + m_1` after two (a sum that forgets, as ``optax.trace`` is, has
    :math:`m_1 = 1` and the same recursion). So :math:`1 - b = 2 - m_2 / m_1` for both.
    """
    if one is None or two is None or one.size != 1:
        return jnp.ones([])
    one, two = (x.reshape(()).astype(jnp.float32) for x in (one, two))
    share = 2 - two / one
    # An average of ones holds just 1 - b after a step. Where that agrees it is the better number:
    # b = 0.999 leaves only three of float32's digits in 2 - m₂/m₁.
    share = jnp.where(jnp.abs(one - share) < 1e-5, one, share)
    # b**count by logarithms, as 1 - b again would lose the digits that share has.
    weight = -jnp.expm1(count.astype(jnp.float32) * jnp.log1p(-share))
    return jnp.where(jnp.isfinite(weight) & (weight > 0), weight, 1.0)


def bias_ratio(owner: OptState, count: Array, first: Pair, second: Pair) -> Array:
    """The factor c that puts the square of a first moment on the scale of a second moment.

    Args:
        owner: the state node that holds both; its own count goes before the other.
        count: int32 scalar, updates so far.
        first: the first moment of a fresh start after one and after two steps of gradient 1.
        second: likewise the second moment.
    """
    if "count" in field_names(owner):  # every tuple has a method of that name
        count = owner.count
    return _weight(count, *second) / jnp.square(_weight(count, *first))


def _rotate_target(
    static: Any, rotations: Bases, refreshed: Array, firsts: Any, seconds: Any, bias: Array
) -> dict[str, Array]:
    """The moments of one target in one state; ``static`` is its view and role names."""
    view, roles = static
    wide = {name: x.astype(jnp.float32) for name, x in (firsts | seconds).items()}
    mean = next((wide[name] for name in firsts), None)
    moved = {name: rotate(view, rotations, wide[name]) for name in firsts}
    for name, role in roles:
        paired = mean if role == SECOND else None
        moved[name] = rotate_second(view, rotations, wide[name], paired, bias)
    return {
        name: jnp.where(refreshed, place_like(moved[name].astype(old.dtype), old), old)
        for name, old in (firsts | seconds).items()
    }


class Change(NamedTuple):
    """A change of bases.

    Attributes:
        projections: the targets.
        new: the bases of each target now.
        old: makes the bases before; called where something changed, and nowhere else.
        refreshed: boolean, one a target: whether its bases changed.
    """

    projections: Sequence[Projection]
    new: Sequence[Bases]
    old: Callable[[], Sequence[Bases]]
    refreshed: Array

    def rotations(self) -> dict[str, Bases]:
        """R of each target, by its path."""
        rows = zip(self.projections, self.new, self.old(), strict=True)
        return {p.path: rotation(p.view, new, old) for p, new, old in rows}


def _rotated(
    change: Change,
    rotations: Mapping[str, Bases],
    count: Array,
    state: PyTree,
    where: frozenset[Keys],
    after_one: PyTree,
    after_two: PyTree,
) -> PyTree:
    """A state with every recognised moment of a target in the new coordinates."""
    targets = {projection.path: projection for projection in change.projections}
    # What of one target one node of the state holds, by the number of the leaf.
    groups: dict[tuple[int, str], dict[int, Site]] = {}
    for number, site in enumerate(sites(state, where)):
        target = targets.get(site.weight or "") if site.role else None
        if target is not None and getattr(site.value, "shape", None) == target.core_shape:
            groups.setdefault((id(site.owner), target.path), {})[number] = site
    one, two = ([unbox(leaf) for leaf in flatten(other)[0]] for other in (after_one, after_two))
    calls, places = [], []
    for (_, path), found in groups.items():
        target = targets[path]
        # By names that weights which look alike have in common; a field may hold several arrays.
        names = {f"{site.field}/{k}": n for k, (n, site) in enumerate(found.items())}
        firsts = {name: n for name, n in names.items() if found[n].role == FIRST}
        others = {name: n for name, n in names.items() if found[n].role != FIRST}
        paired = [n for n in others.values() if found[n].role == SECOND]
        bias = jnp.ones([])
        if firsts and paired:
            pair = next(iter(firsts.values())), paired[0]
            owner = found[pair[0]].owner
            first, second = ((one[number], two[number]) for number in pair)
            bias = bias_ratio(owner, count, first, second)
        static = target.view, tuple((name, found[n].role) for name, n in others.items())
        values = ({f: found[n].value for f, n in part.items()} for part in (firsts, others))
        calls.append((static, (rotations[path], change.refreshed[target.number], *values, bias)))
        places.append(names)
    moved = map_sharing(_rotate_target, calls)
    return _replaced(
        state,
        {
            number: result[name]
            for names, result in zip(places, moved, strict=True)
            for name, number in names.items()
        },
    )


def _reset(change: Change, state: PyTree, where: frozenset[Keys], fresh: PyTree) -> PyTree:
    """Puts everything that belongs to a refreshed target back to its initial value."""
    refreshed = {p.path: change.refreshed[p.number] for p in change.projections}
    initial = flatten(fresh)[0]
    new = {}
    for number, site in enumerate(sites(state, where)):
        if site.weight in refreshed and site.value is not None:
            start = place_like(unbox(initial[number]), site.value)
            new[number] = jnp.where(refreshed[site.weight], start, site.value)
    return _replaced(state, new)


def _replaced(state: PyTree, values: Mapping[int, Array]) -> PyTree:
    """A state with some leaves replaced, by number."""
    leaves, treedef = flatten(state)
    for number, value in values.items():
        leaves[number] = rebox(leaves[number], value)
    return unflatten(treedef, leaves)


def carry(
    rule: Moments,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: PyTree,
    cores: PyTree,
    change: Change,
    count: Array,
    extra_args: dict[str, Any],
) -> PyTree:
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

    def carried() -> PyTree:
        if callable(rule):
            return rule(inner_state, change.rotations())
        where = mirrors(inner_state, cores, inner)
        if rule == "reset":
            fresh = inner.init(jax.tree.map(jnp.zeros_like, cores))
            return _reset(change, inner_state, where, fresh)
        rotations = change.rotations()

        def rotated(state: PyTree, inside: frozenset[Keys], *probed: PyTree) -> PyTree:
            return _rotated(change, rotations, count, state, inside, *probed)

        probed = decay_rates(inner, inner_state, cores, extra_args)
        return map_opened(rotated, inner_state, where, *probed)

    return jax.lax.cond(jnp.any(change.refreshed), carried, lambda: inner_state)
