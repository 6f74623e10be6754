"""Bases from what flows through a model and not from its gradients: ``activation_basis``."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays import factorize
from lowrank_optax._arrays.orthonormal import gram, orthonormalize, times
from lowrank_optax._arrays.tree import Params
from lowrank_optax._bases import find
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._matrix_free.loss import CompactLoss
from lowrank_optax._matrix_free.products import moment_of
from lowrank_optax._matrix_free.targets import CompactTarget
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import Projection, Tracking
from lowrank_optax._plan.target import SIDES, Targets
from lowrank_optax._plan.view import Bases

# Further directions, dropped at the end: a random start may all but miss a leading one.
OVERSAMPLING = 8


class _Side(NamedTuple):
    """One side of one target: what is static of it, and its random directions."""

    target: Projection
    name: str
    noise: Array


def _ordered(
    directions: Float[Array, "*rows r"],
    images: Float[Array, "*rows r"],
    noise: Float[Array, "*rows r"],
    batch_ndim: int,
) -> Float[Array, "*rows r"]:
    """An orthonormal basis of ``A Ω`` whose columns are principal directions, largest first."""
    vectors = factorize.eigenvectors(gram(directions, images, batch_ndim))
    return orthonormalize(times(images, vectors, batch_ndim), noise, batch_ndim)


def activation_basis(
    loss_fn: Callable[[Any, Any], Any],
    params: Params,
    batches: Iterable[Any],
    *,
    rank: Rank = 32,
    side: str = "smaller",
    targets: Targets = None,
    seed: int = 0,
) -> dict[str, Bases]:
    r"""Bases of the principal directions of activations, captured from a model as it is.

    For a layer :math:`y = xW` the gradient is :math:`x^T\delta`: its columns lie in the span of the
    inputs x, its rows in the span of the output gradients :math:`\delta`. So the reduction side's
    basis holds the leading eigenvectors of :math:`x^Tx`, the output side's those of
    :math:`\delta^T\delta`, summed over all tokens of all batches and all uses of the weight,
    uncentred. They are found by subspace iteration; neither matrix is formed.

    Args:
        loss_fn: a function ``(params, batch)`` to a scalar; plain JAX, Flax, Equinox, with ``jit``,
            ``scan``, ``remat`` and ``cond`` inside, as for :func:`compact_value_and_grad`.
        params: the params tree.
        batches: a few batches; each is visited four times.
        rank: columns of each basis, as for the tracker that the bases are for.
        side: likewise.
        targets: likewise.
        seed: seed of the random starts.

    Returns:
        The bases of each target by path, for ``init=`` of :func:`learn_basis`; float32, columns
        orthonormal and in descending order.

    Raises:
        ValueError: if there is no batch, if a target meets an operation that does not show what
            it is multiplied with (a convolution, a custom derivative), or if nothing flows
            through it.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["kernel"]) ** 2)
        >>> bases = lro.activation_basis(loss_fn, params, [jnp.eye(8, 16)], rank=4)
        >>> tracker = lro.learn_basis(rank=4, init=bases)
        >>> tracker.init(params).reduction_basis["kernel"].shape
        (16, 4)
    """
    check_rank(rank, "activation_basis: rank")
    check_choice("activation_basis: side", side, SIDES)
    batches = list(batches)
    if not batches:
        raise ValueError("activation_basis: batches is empty; give one batch at least")
    plan = make_plan(params, targets, rank, side)
    sides = []
    for target in plan.projections:
        for place, name in enumerate(target.sides):
            key = jax.random.fold_in(find.leaf_key(seed, 0, target.number), place)
            columns = min(target.rank + OVERSAMPLING, target.view.length(name))
            dtype = jnp.dtype(jnp.float32)
            noise = find.random_directions(key, target.view, name, columns, dtype)
            sides.append(_Side(target, name, noise))
    used: set[str] = set()

    def report(use: tuple[str, str, bool]) -> None:
        path, primitive, shown = use
        if not shown:
            raise ValueError(
                f"{path!r}: activation_basis cannot see what {primitive!r} multiplies this weight "
                f"with; leave it out, targets=[({path!r}, None), ...], or start it from its "
                'gradient, init="gradient"'
            )
        used.add(path)

    @jax.jit
    def moments(params: Params, batch: Any, directions: list[Array]) -> list[Array]:
        never = jnp.zeros([], bool)
        facts = (Tracking(), never, never, never)
        seen = [CompactTarget(target, Bases(), *facts) for target in plan.projections]
        loss = CompactLoss(loss_fn, (params, batch), {}, 0, False, seen)
        wanted = [
            [
                moment_of(s.target.view, s.name, x)
                for s, x in zip(sides, directions, strict=True)
                if s.target is target
            ]
            for target in plan.projections
        ]
        found = loss.value_and_products(wanted, report)[3]
        return [product for row in found for product in row]

    directions = [_orthonormal(s.noise, s) for s in sides]
    for turn in range(find.COLD_ITERATIONS):
        images = moments(params, batches[0], directions)
        for batch in batches[1:]:
            images = jax.tree.map(jnp.add, images, moments(params, batch, directions))
        for entry, image in zip(sides, images, strict=True):
            path = entry.target.path
            if path not in used or not find.is_usable(image):
                raise ValueError(
                    f"{path!r}: no finite, nonzero activation meets the {entry.name} side of this "
                    "weight in these batches; leave it out of targets"
                )
        last = turn + 1 == find.COLD_ITERATIONS
        directions = [
            _ordered(old, new, s.noise, len(s.target.view.batch_axes))
            if last
            else _orthonormal(new, s)
            for s, old, new in zip(sides, directions, images, strict=True)
        ]
    by_path: dict[str, dict[str, Array]] = {}
    for entry, basis in zip(sides, directions, strict=True):
        by_path.setdefault(entry.target.path, {})[entry.name] = basis[..., : entry.target.rank]
    return {path: Bases(**found) for path, found in by_path.items()}


def _orthonormal(x: Array, side: _Side) -> Array:
    return orthonormalize(x, side.noise, len(side.target.view.batch_axes))
