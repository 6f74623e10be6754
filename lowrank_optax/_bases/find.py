"""The ways to find a gradient's leading subspace: one function a method.

Each takes the gradient of one target and returns an orthonormal basis of one side. They
differ in cost by orders of magnitude and, on real gradients, hardly in what they capture.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lowrank_optax._arrays import factorize
from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract, wide_dtype
from lowrank_optax._arrays.norms import unit
from lowrank_optax._arrays.orthonormal import orthonormalize, whiten
from lowrank_optax._plan.view import REDUCTION, View, other

METHODS = ("subspace", "svd", "gram", "random", "frozen")

# From a random start a few iterations find the leading directions; from the previous basis
# one is enough, since each multiplies the error by the squared ratio of singular values.
COLD_ITERATIONS = 4
WARM_ITERATIONS = 1
# A warm start that is exactly orthogonal to the new gradient's subspace would never see it.
# A little randomness in the start lets one iteration rediscover any direction.
START_JITTER = 0.03


def leaf_key(seed: int, count: jax.typing.ArrayLike, target: int) -> Array:
    """The PRNG key of one target at one step; trackers keep none in their state."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), target)


def random_directions(
    key: Array, view: View, side: str, rank: int, dtype: jnp.dtype
) -> Float[Array, "*rows r"]:
    """Gaussian columns of norm about 1 on one side of a view."""
    shape = view.basis_shape(side, rank)
    size = view.rows if side == REDUCTION else view.columns
    return jax.random.normal(key, shape, dtype) / jnp.asarray(size**0.5, dtype)


def random_basis(
    key: Array, view: View, side: str, rank: int, dtype: jnp.dtype
) -> Float[Array, "*rows r"]:
    """A random orthonormal basis, uniform over subspaces."""
    start_key, fill_key = jax.random.split(key)
    start = random_directions(start_key, view, side, rank, dtype)
    fill = random_directions(fill_key, view, side, rank, dtype)
    return orthonormalize(start, fill, len(view.batch_axes))


def iteration_start(
    basis: Float[Array, "*rows r"], noise: Float[Array, "*rows r"]
) -> Float[Array, "*rows r"]:
    """Where subspace iteration starts: beside a basis, so that no direction is out of reach."""
    return basis + START_JITTER * noise


def iteration_directions(
    images: Float[Array, "*rows r"], batch_ndim: int
) -> Float[Array, "*rows r"]:
    """The first half of an iteration: from ``GᵀP`` to the directions Ω of the other side.

    They are whitened, so that they are told apart by the gradient's singular values and not by
    their squares, which float32 resolves to only three digits.
    """
    return whiten(images, batch_ndim)


def iteration_basis(
    images: Float[Array, "*rows r"], noise: Float[Array, "*rows r"], batch_ndim: int
) -> Float[Array, "*rows r"]:
    """The second half: from ``G Ω`` to the basis; noise fills null directions."""
    return orthonormalize(images, noise, batch_ndim)


def subspace_iteration(
    gradient: Float[Array, "..."],
    view: View,
    side: str,
    basis: Float[Array, "*rows r"],
    noise: Float[Array, "*rows r"],
    iterations: int | Int[Array, ""],
) -> Float[Array, "*rows r"]:
    r"""Block subspace iteration from a given start.

    .. math:: P \leftarrow \mathrm{orth}\bigl(G\,\mathrm{whiten}(G^T P)\bigr)

    What each product with G is made into is said by :func:`iteration_directions` and
    :func:`iteration_basis`, which serve a backward pass that makes these products too.

    Args:
        gradient: the leaf-shaped gradient G.
        view: how to read it.
        side: the side that the basis lives on.
        basis: the start, ``(*batch, *side, r)``.
        noise: random directions of the same shape: jitter of the start and filling of
            null directions.
        iterations: how often to iterate, a Python int or an int32 scalar.

    Returns:
        The new basis, orthonormal whatever the gradient's rank.

    References:
        Halko, Martinsson, Tropp, `Finding structure with randomness
        <https://arxiv.org/abs/0909.4061>`_, 2011, algorithm 4.4
    """
    batch_ndim = len(view.batch_axes)

    def iterate(_, basis):
        directions = iteration_directions(view.images(gradient, side, basis), batch_ndim)
        return iteration_basis(view.images(gradient, other(side), directions), noise, batch_ndim)

    start = view.place_basis(iteration_start(basis, noise), side, gradient)
    return jax.lax.fori_loop(0, iterations, iterate, start)


def singular_vectors(
    gradient: Float[Array, "..."], view: View, side: str, rank: int
) -> Float[Array, "*rows r"]:
    """The leading singular vectors from a full SVD: the reference, slow by design."""
    matrix = view.as_matrix(gradient.astype(wide_dtype(gradient)))
    left, right = factorize.singular_vectors(matrix)
    vectors = left if side == REDUCTION else right
    return vectors[..., :rank].reshape(view.basis_shape(side, rank))


def gram_eigenvectors(
    gradient: Float[Array, "..."], view: View, side: str, rank: int
) -> Float[Array, "*rows r"]:
    """The leading eigenvectors of ``G Gᵀ`` (or ``Gᵀ G``), of the size of one side."""
    matrix = view.as_matrix(gradient.astype(wide_dtype(gradient)))
    # Squares of entries must neither overflow nor vanish.
    matrix = matrix / unit(matrix)
    batch = "abcdefgh"[: len(view.batch_axes)]
    rows = f"{batch}mk,{batch}nk" if side == REDUCTION else f"{batch}km,{batch}kn"
    squares = contract(f"{rows}->{batch}mn", matrix, matrix, precision=REFRESH_PRECISION)
    vectors = factorize.eigenvectors(squares)
    return vectors[..., :rank].reshape(view.basis_shape(side, rank))


def new_basis(
    method: str,
    gradient: Float[Array, "..."],
    view: View,
    side: str,
    basis: Float[Array, "*rows r"],
    key: Array,
    first: Array,
) -> Float[Array, "*rows r"]:
    """The refreshed basis by any of :data:`METHODS`, in float32 or wider.

    Args:
        method: one of :data:`METHODS`; ``"frozen"`` finds its only basis like
            ``"subspace"``.
        gradient: the leaf-shaped gradient.
        view: how to read it.
        side: the side that the basis lives on.
        basis: the previous basis.
        key: a PRNG key that is new at each refresh.
        first: boolean scalar, whether ``basis`` is still the random one of ``init``.

    Returns:
        An orthonormal basis of the shape of ``basis``.
    """
    rank = basis.shape[-1]
    basis = basis.astype(wide_dtype(basis))
    if method == "random":
        return random_basis(key, view, side, rank, basis.dtype)
    if method == "svd":
        return singular_vectors(gradient, view, side, rank)
    if method == "gram":
        return gram_eigenvectors(gradient, view, side, rank)
    noise = random_directions(key, view, side, rank, basis.dtype)
    iterations = jnp.where(first, COLD_ITERATIONS, WARM_ITERATIONS)
    return subspace_iteration(gradient, view, side, basis, noise, iterations)


def is_usable(gradient: Float[Array, "..."]) -> Array:
    """Whether a gradient can define a subspace: every entry finite, and not all (near) 0."""
    # A NaN survives max; squares would overflow for large gradients and vanish for small.
    largest = jnp.max(jnp.abs(gradient.astype(wide_dtype(gradient))))
    return jnp.isfinite(largest) & (largest > jnp.finfo(largest.dtype).tiny * 1e4)
