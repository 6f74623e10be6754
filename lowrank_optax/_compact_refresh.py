"""Refreshing bases without a gradient: subspace iteration in backward passes.

``G (Gᵀ P)`` takes two products with the gradient of one batch. Each is a compact backward pass: the
first gives the core ``PᵀG``, the second, with the core as the basis of the other side, ``G Ω``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax import _subspace_methods, _tree
from lowrank_optax._compact_loss import CompactLoss
from lowrank_optax._compact_targets import (
    ITERATED,
    CompactTarget,
    main_products,
    one_sided,
    product_of,
    view_of,
    wide,
)
from lowrank_optax._contract import wide_dtype
from lowrank_optax._factored import Product
from lowrank_optax._orthonormalize import orthonormalize, whiten
from lowrank_optax._view import OUTPUT, REDUCTION, Bases, View

_OTHER = {REDUCTION: OUTPUT, OUTPUT: REDUCTION}


def _thin(view: View, side: str, core: Array) -> Array:
    """A one-sided core as a thin matrix of the other side, the rank axis last."""
    return jnp.moveaxis(core, len(view.batch_axes), -1) if side == REDUCTION else core


class _Side(NamedTuple):
    """One side of one target, and what is static of it.

    Attributes:
        target: the number of the target.
        side: the side's name.
        static: view, side and rank: what decides the shapes of its arrays.
        key: the PRNG key of its random directions at this step.
    """

    target: int
    side: str
    static: tuple[View, str, int]
    key: Array


def _sides(targets: Sequence[CompactTarget], methods: Sequence[str]) -> list[_Side]:
    """Every side that has a basis which one of ``methods`` finds."""
    sides = []
    for number, target in enumerate(targets):
        for place, side in enumerate(target.plan.sides if target.method in methods else ()):
            # The keys of the full-gradient path.
            key = jax.random.fold_in(target.key, place)
            sides.append(_Side(number, side, (view_of(target), side, target.plan.rank), key))
    return sides


def _replaced(bases: Sequence[Bases], sides: Sequence[_Side], new: Sequence[Array]) -> list[Bases]:
    result = list(bases)
    for entry, basis in zip(sides, new, strict=True):
        result[entry.target] = result[entry.target]._replace(**{entry.side: basis})
    return result


def _start(targets: Sequence[CompactTarget]) -> list[Bases]:
    """The bases of the first pass.

    The stored ones, but where a refresh is due: then the start of a subspace iteration, or new
    random bases.
    """
    bases = [wide(target.bases) for target in targets]
    iterated, random = _sides(targets, ITERATED), _sides(targets, ("random",))

    def jittered(static: Any, basis: Array, key: Array, due: Array) -> Array:
        noise = _subspace_methods.random_directions(key, *static, basis.dtype)
        return jnp.where(due, basis + _subspace_methods.START_JITTER * noise, basis)

    def resampled(static: Any, basis: Array, key: Array, due: Array) -> Array:
        def fresh() -> Array:
            drawn = _subspace_methods.random_basis(key, *static, wide_dtype(basis))
            return drawn.astype(basis.dtype)

        return jax.lax.cond(due, fresh, lambda: basis)

    for fn, sides, source in ((jittered, iterated, bases), (resampled, random, None)):
        calls = []
        for entry in sides:
            target = targets[entry.target]
            basis = getattr(target.bases if source is None else source[entry.target], entry.side)
            calls.append((entry.static, (basis, entry.key, target.due)))
        bases = _replaced(bases, sides, _tree.map_sharing(fn, calls))
    return [wide(b) for b in bases]


def _refine(
    loss: CompactLoss,
    bases: Sequence[Bases],
    products: Sequence[Sequence[Array]],
) -> list[Bases]:
    """One step of subspace iteration, ``P ← orth(G whiten(GᵀP))``, by one more backward pass."""
    sides = _sides(loss.targets, ITERATED)

    def whitened(static: Any, core: Array) -> Array:
        view, side, _ = static
        return whiten(_thin(view, side, core), len(view.batch_axes))

    cores = [
        _side_core(loss.targets[entry.target], entry.side, products[entry.target])
        for entry in sides
    ]
    images = _tree.map_sharing(
        whitened, [(entry.static, (core,)) for entry, core in zip(sides, cores, strict=True)]
    )
    wanted: list[list[Product]] = [[] for _ in loss.targets]
    for entry, image in zip(sides, images, strict=True):
        view, side, _ = entry.static
        wanted[entry.target].append(product_of(view, one_sided(_OTHER[side], image)))
    _, _, _, found = loss.value_and_products(wanted)

    def orthonormalized(static: Any, image: Array, key: Array) -> Array:
        view, side, _ = static
        noise = _subspace_methods.random_directions(key, *static, image.dtype)
        return orthonormalize(_thin(view, _OTHER[side], image), noise, len(view.batch_axes))

    flat = [image for images in found for image in images]
    calls = [(entry.static, (image, entry.key)) for entry, image in zip(sides, flat, strict=True)]
    return _replaced(bases, sides, _tree.map_sharing(orthonormalized, calls))


def _side_core(target: CompactTarget, side: str, products: Sequence[Array]) -> Array:
    """The product with the basis of one side alone."""
    if len(target.plan.sides) == 2:
        return products[1 + target.plan.sides.index(side)]
    # Extra directions came after the basis' own.
    rank, axis = target.plan.rank, view_of(target).core_axes([side])[side]
    return jax.lax.slice_in_dim(products[0], 0, rank, axis=axis)


class Pass(NamedTuple):
    """What one backward pass gives, and the bases that it was made with.

    Attributes:
        trip: int32 scalar, passes so far.
        bases: the bases of each target.
        due: for each target whether its bases are new, or about to be.
        value: the loss.
        aux: arrays that the loss returned beside it.
        gradients: gradients of leaves that are no target, by number.
        products: for each target its core, and what else a refresh needs.
    """

    trip: Array
    bases: list[Bases]
    due: list[Array]
    value: Array
    aux: list[Array]
    gradients: dict[int, Array]
    products: list[list[Array]]


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def _iterations(target: CompactTarget) -> Array:
    """How many iterations a target's refresh takes at this step."""
    if target.method not in ITERATED:
        return jnp.zeros([], jnp.int32)
    cold, warm = _subspace_methods.COLD_ITERATIONS, _subspace_methods.WARM_ITERATIONS
    return jnp.where(target.due, jnp.where(target.first, cold, warm), 0)


def _still_due(target: CompactTarget, trip: Array, due: Array, products: list[Array]) -> Array:
    """Whether a refresh goes on, seen from the products of the first pass.

    Their basis is as good as random then: they are zero or not finite just if the gradient is.
    """
    if target.method not in ITERATED:
        return due
    usable = _subspace_methods.is_usable(products[-1]) & _all_finite(products)
    return due & (usable | (trip > 0))


def _accept(
    target: CompactTarget, due: Array, current: Bases, refined: Bases, active: Array, last: Array
) -> tuple[Bases, Array]:
    """The bases after one iteration: refined, as they are, or, if that failed, as stored."""
    if target.method not in ITERATED:
        return current, due
    due = due & _all_finite(refined)

    def choose(new: Array, old: Array, stored: Array) -> Array:
        # What update will store is what the last pass must project on.
        rounded = jnp.where(last, new.astype(stored.dtype).astype(new.dtype), new)
        return jnp.where(due, jnp.where(active, rounded, old), stored.astype(new.dtype))

    return jax.tree.map(choose, refined, current, target.bases), due


def refreshing_pass(loss: CompactLoss, extra: Sequence[Array | None]) -> Pass:
    """Refreshes the bases that are due, then differentiates with them.

    A loop of which one turn, a backward pass, runs between refreshes. At a refresh each
    further turn is one iteration: a backward pass for ``GᵀP`` and one for ``G Ω``.

    Args:
        loss: the loss.
        extra: for each target extra directions, or None.

    Returns:
        The last pass, with the bases that it used.
    """
    targets = loss.targets

    def differentiate(bases: list[Bases]) -> tuple:
        products = [main_products(*row) for row in zip(targets, bases, extra, strict=True)]
        return loss.value_and_products(products)

    due = [target.due for target in targets]
    start = _start(targets)
    if not any(target.method in ITERATED for target in targets):
        return Pass(jnp.zeros([], jnp.int32), start, due, *differentiate(start))
    counts = [_iterations(target) for target in targets]
    turns = jnp.max(jnp.stack(counts))

    def turn(state: Pass) -> Pass:
        value, aux, gradients, products = differentiate(state.bases)

        def refine() -> tuple[list[Bases], list[Array]]:
            due = [
                _still_due(target, state.trip, wanted, found)
                for target, wanted, found in zip(targets, state.due, products, strict=True)
            ]
            refined = _refine(loss, state.bases, products)
            rows = [
                _accept(target, wanted, old, new, state.trip < count, state.trip + 1 == count)
                for target, wanted, old, new, count in zip(
                    targets, due, state.bases, refined, counts, strict=True
                )
            ]
            return [bases for bases, _ in rows], [done for _, done in rows]

        bases, due = jax.lax.cond(state.trip < turns, refine, lambda: (state.bases, state.due))
        return Pass(state.trip + 1, bases, due, value, aux, gradients, products)

    shapes = jax.eval_shape(differentiate, start)
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    first = Pass(jnp.zeros([], jnp.int32), start, due, *empty)
    return jax.lax.while_loop(lambda state: state.trip <= turns, turn, first)
