"""Refreshing bases without a gradient: subspace iteration in backward passes.

``G (Gᵀ P)`` takes two products with the gradient of one batch. Each is a compact backward pass: the
first gives the core ``PᵀG``, the second, with the core as the basis of the other side, ``G Ω``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.mesh import place_like, shard_like
from lowrank_optax._arrays.sharing import map_sharing
from lowrank_optax._bases import find, storage
from lowrank_optax._bases.tracker import all_finite
from lowrank_optax._matrix_free.loss import CompactLoss
from lowrank_optax._matrix_free.products import product_of
from lowrank_optax._matrix_free.targets import CompactTarget
from lowrank_optax._plan.view import REDUCTION, Bases, View
from lowrank_optax._plan.view import other as opposite


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

    def basis(self, bases: Sequence[Bases]) -> Array:
        """This side's basis out of those of all targets."""
        return getattr(bases[self.target], self.side)


def _sides(targets: Sequence[CompactTarget], iterated: bool) -> list[_Side]:
    """Every side that has a basis which subspace iteration finds, or one that is drawn."""
    sides = []
    for number, target in enumerate(targets):
        projection = target.projection
        here = projection.sides if target.tracking.iterates == iterated else ()
        for place, side in enumerate(here):
            # The keys of the full-gradient path.
            key = jax.random.fold_in(target.key, place)
            static = projection.view, side, projection.rank
            sides.append(_Side(number, side, static, key))
    return sides


def _replaced(bases: Sequence[Bases], sides: Sequence[_Side], new: Sequence[Array]) -> list[Bases]:
    result = list(bases)
    for entry, basis in zip(sides, new, strict=True):
        result[entry.target] = result[entry.target]._replace(**{entry.side: basis})
    return result


def _resampled(targets: Sequence[CompactTarget]) -> list[Bases]:
    """The stored bases, but new random ones where these are due."""
    sides = _sides(targets, iterated=False)

    def one(static: tuple[View, str, int], basis: Array, key: Array, due: Array) -> Array:
        def fresh() -> Array:
            drawn = find.random_basis(key, *static, wide_dtype(basis))
            return place_like(storage.store(drawn, static[0], basis.dtype), basis)

        return jax.lax.cond(due, fresh, lambda: basis)

    stored = [target.bases for target in targets]
    calls = [(s.static, (s.basis(stored), s.key, targets[s.target].due)) for s in sides]
    new = _replaced(stored, sides, map_sharing(one, calls))
    return [target.wide(b) for b, target in zip(new, targets, strict=True)]


def _start(targets: Sequence[CompactTarget], bases: Sequence[Bases]) -> list[Bases]:
    """Where subspace iteration starts: beside the old basis if a refresh is due."""
    sides = _sides(targets, iterated=True)

    def one(static: tuple[View, str, int], basis: Array, key: Array, due: Array) -> Array:
        noise = find.random_directions(key, *static, basis.dtype)
        return jnp.where(due, find.iteration_start(basis, noise), basis)

    calls = [(s.static, (s.basis(bases), s.key, targets[s.target].due)) for s in sides]
    return _replaced(bases, sides, map_sharing(one, calls))


def _by_target(count: int, sides: Sequence[_Side], items: Sequence[Any]) -> list[list[Any]]:
    rows: list[list[Any]] = [[] for _ in range(count)]
    for entry, item in zip(sides, items, strict=True):
        rows[entry.target].append(item)
    return rows


def _side_products(
    loss: CompactLoss, sides: Sequence[_Side], bases: Sequence[Array], other: bool
) -> list[Array]:
    """The gradient's product with one thin matrix a side, by one backward pass.

    Args:
        loss: the loss.
        sides: the sides.
        bases: for each a thin matrix, on that side or, with ``other``, on the opposite one.
        other: which.

    Returns:
        For each a thin matrix of the opposite kind, rank axis last.
    """
    products = []
    for entry, basis in zip(sides, bases, strict=True):
        view, side, _ = entry.static
        products.append(product_of(view, Bases.of(opposite(side) if other else side, basis)))
    wanted = _by_target(len(loss.targets), sides, products)
    _, _, _, found = loss.value_and_products(wanted)
    flat = [product for row in found for product in row]
    thin, stored = [], [target.bases for target in loss.targets]
    for entry, core in zip(sides, flat, strict=True):
        view, side, _ = entry.static
        target = loss.targets[entry.target]
        if other:
            thin.append(shard_like(_thin(view, opposite(side), core), entry.basis(stored)))
        else:
            thin.append(_thin(view, side, shard_like(core, target.moment)))
    return thin


def _iterations(target: CompactTarget) -> Array:
    """How many iterations a target's refresh takes at this step."""
    if not target.tracking.iterates:
        return jnp.zeros([], jnp.int32)
    cold, warm = find.COLD_ITERATIONS, find.WARM_ITERATIONS
    return jnp.where(target.due, jnp.where(target.first, cold, warm), 0)


def _accept(target: CompactTarget, due: Array, refined: Bases, last: Array) -> tuple[Bases, Array]:
    """The bases after one iteration: refined, or, if that failed or was not due, as stored."""
    if not target.tracking.iterates:
        return refined, due
    due = due & all_finite(refined)

    def choose(new: Array, stored: Array) -> Array:
        # What update will store is what the last pass must project on.
        view, new = target.projection.view, place_like(new, stored)
        as_read = storage.read(storage.store(new, view, stored.dtype), view).astype(new.dtype)
        before = storage.read(stored, view).astype(new.dtype)
        return jnp.where(due, jnp.where(last, as_read, new), before)

    return jax.tree.map(choose, refined, target.bases), due


def _iterate(loss: CompactLoss, bases: Sequence[Bases]) -> tuple[list[Bases], list[Array]]:
    """Subspace iteration, ``P ← orth(G whiten(GᵀP))``, for the targets that are due.

    Returns:
        The new bases, and for each target whether it has them.
    """
    targets, sides = loss.targets, _sides(loss.targets, iterated=True)
    # All that are due take as many iterations as the one that needs most: the bases of an
    # iteration are then needed for its first pass alone, and take no memory in the second.
    turns = jnp.max(jnp.stack([_iterations(target) for target in targets]))

    def whitened(static: tuple[View, str, int], images: Array) -> Array:
        return find.iteration_directions(images, len(static[0].batch_axes))

    def orthonormalized(static: tuple[View, str, int], image: Array, key: Array) -> Array:
        noise = find.random_directions(key, *static, image.dtype)
        return find.iteration_basis(image, noise, len(static[0].batch_axes))

    def iteration(state: tuple[Array, list[Bases], list[Array]]) -> Any:
        trip, bases, due = state
        current = [entry.basis(bases) for entry in sides]
        images = _side_products(loss, sides, current, other=False)
        # The first product is with a start that is as good as random: it is zero or not
        # finite just if the gradient is.
        by_target = _by_target(len(targets), sides, images)
        due = [
            wanted & ((trip > 0) | (find.is_usable(found[-1]) & all_finite(found)))
            if found
            else wanted
            for wanted, found in zip(due, by_target, strict=True)
        ]
        statics = [entry.static for entry in sides]
        calls = [(static, (image,)) for static, image in zip(statics, images, strict=True)]
        directions = map_sharing(whitened, calls)
        # The checks of these products must not keep them alive during the next pass.
        directions, due = jax.lax.optimization_barrier((directions, due))
        images = _side_products(loss, sides, directions, other=True)
        calls = [(s.static, (image, s.key)) for s, image in zip(sides, images, strict=True)]
        refined = _replaced(bases, sides, map_sharing(orthonormalized, calls))
        rows = [
            _accept(target, wanted, new, trip + 1 == turns)
            for target, wanted, new in zip(targets, due, refined, strict=True)
        ]
        return trip + 1, [basis for basis, _ in rows], [done for _, done in rows]

    start = (jnp.zeros([], jnp.int32), _start(targets, bases), [t.due for t in targets])
    _, new, done = jax.lax.while_loop(lambda state: state[0] < turns, iteration, start)
    return new, done


def refreshed_bases(loss: CompactLoss) -> tuple[list[Bases], list[Array]]:
    """The bases to differentiate with: refreshed where that is due.

    Between refreshes nothing is computed. A refresh takes two backward passes an iteration, one for
    ``GᵀP`` and one for ``G Ω``.

    Args:
        loss: the loss.

    Returns:
        The bases of each target, in float32 or wider, and whether they are new.
    """
    bases, due = _resampled(loss.targets), [target.due for target in loss.targets]
    iterated = [t.due for t in loss.targets if t.tracking.iterates]
    if not iterated:
        return bases, due
    return jax.lax.cond(
        jnp.any(jnp.stack(iterated)), lambda: _iterate(loss, bases), lambda: (bases, due)
    )
