"""Orthonormal columns for any finite input, from Gram matrices alone.

Only ``r x r`` matrices are factorized. That compiles in seconds for a TPU, where a QR,
SVD or eigendecomposition of the full matrix takes minutes, and under a mesh the only
communication is the sum of an ``r x r`` Gram matrix.
"""

import string

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract
from lowrank_optax._arrays.factorize import inverse_factor
from lowrank_optax._arrays.norms import unit


def _labels(ndim: int) -> str:
    return string.ascii_lowercase[:ndim]


def gram(
    left: Float[Array, "..."], right: Float[Array, "..."], batch_ndim: int = 0
) -> Float[Array, "..."]:
    """``leftᵀ right`` for thin matrices ``(*batch, *side, r)``: ``(*batch, r, r)``."""
    side = _labels(left.ndim - 1)
    return contract(
        f"{side}y,{side}z->{side[:batch_ndim]}yz", left, right, precision=REFRESH_PRECISION
    )


def times(
    thin: Float[Array, "..."], small: Float[Array, "..."], batch_ndim: int
) -> Float[Array, "..."]:
    """``thin @ small``: columns of a thin matrix recombined by an ``r x r`` one."""
    side = _labels(thin.ndim - 1)
    return contract(
        f"{side}y,{side[:batch_ndim]}yz->{side}z", thin, small, precision=REFRESH_PRECISION
    )


def inverse(squares: Float[Array, "*batch r r"]) -> Float[Array, "*batch r r"]:
    """The inverse of a positive definite ``r x r`` matrix, on every device."""
    root = inverse_factor(squares)
    return jnp.matmul(root, jnp.swapaxes(root, -1, -2), precision=REFRESH_PRECISION)


def orthogonal_to(
    basis: Float[Array, "*rows r"], x: Float[Array, "*rows k"], batch_ndim: int = 0
) -> Float[Array, "*rows k"]:
    """``x − P Pᵀx``: the part of thin matrices outside the span of an orthonormal basis."""
    return x - times(basis, gram(basis, x, batch_ndim), batch_ndim)


def whiten(
    y: Float[Array, "*rows r"],
    batch_ndim: int = 0,
    *,
    well_conditioned: bool | Bool[Array, ""] = False,
) -> Float[Array, "*rows r"]:
    r"""Recombines the columns of ``y`` so that they are orthonormal where ``y`` has rank.

    One pass of shifted Cholesky: with :math:`L L^T = Y^T Y + sI`, returns
    :math:`Y L^{-T}`. Singular values far above :math:`\sqrt s` become 1, those far below
    it stay near 0, and nothing is ever NaN.

    Args:
        y: thin matrices ``(*batch, *side, r)``, any finite floats.
        batch_ndim: number of leading axes that index independent matrices.
        well_conditioned: promises that the columns are independent; a smaller shift then
            leaves them orthonormal to working precision.

    Returns:
        An array of the shape of ``y``.
    """
    # With the largest entry at 1, so that squares neither overflow nor vanish.
    y = y / unit(y, range(batch_ndim, y.ndim))
    squares = gram(y, y, batch_ndim)
    rank = y.shape[-1]
    identity = jnp.eye(rank, dtype=squares.dtype)
    eps = jnp.finfo(squares.dtype).eps
    # The shift must cover the rounding error of the Gram matrix and of its factorization, at
    # most in proportion to the trace; and it must be positive when the trace is 0.
    diagonal = jnp.diagonal(squares, axis1=-2, axis2=-1)
    size = jnp.where(well_conditioned, jnp.max(diagonal, axis=-1), 4 * jnp.sum(diagonal, axis=-1))

    shift = eps * size + jnp.finfo(squares.dtype).tiny ** 0.5
    shifted = squares + shift[..., None, None] * identity
    return times(y, inverse_factor(shifted), batch_ndim)


def orthonormalize(
    y: Float[Array, "*rows r"],
    fill: Float[Array, "*rows r"],
    batch_ndim: int = 0,
) -> Float[Array, "*rows r"]:
    r"""Orthonormal columns that span those of ``y``, for any finite ``y``.

    .. math:: Q_1 = Y L^{-T}, \qquad
              Q = \mathrm{orth}\bigl(Q_1 + (I - Q_1 Q_1^T) Z\,(I - Q_1^T Q_1)^2\bigr)

    where :math:`L L^T = Y^T Y + sI`. Directions in which ``y`` is numerically
    rank-deficient come out of the shifted factorization with norm near 0; the deficit
    :math:`I - Q_1^T Q_1` is the identity on exactly these and 0 elsewhere, so it selects how
    much of the random ``fill`` :math:`Z` each direction takes. (Its square keeps the fill out
    of directions that are merely weak.)

    Args:
        y: thin matrices ``(*batch, *side, r)``, with r no larger than the product of the
            side axes. Any finite floats, zeros included.
        fill: random matrices of the same shape with columns of norm about 1; they replace
            null directions.
        batch_ndim: number of leading axes that index independent matrices.

    Returns:
        An array of the shape of ``y`` with orthonormal columns to working precision.

    References:
        Fukaya et al., `Shifted Cholesky QR for computing the QR factorization of
        ill-conditioned matrices <https://arxiv.org/abs/1809.11085>`_, 2020
    """
    identity = jnp.eye(y.shape[-1], dtype=y.dtype)

    def one_pass(number: Array, q: Array) -> Array:
        q = whiten(q, batch_ndim, well_conditioned=number > 0)
        deficit = identity - gram(q, q, batch_ndim)
        deficit = jnp.matmul(deficit, deficit, precision=REFRESH_PRECISION)
        return q + times(orthogonal_to(q, fill, batch_ndim), deficit, batch_ndim)

    # After the first pass the columns are well conditioned and nothing more is filled; each
    # further one squares what is left of the error, and the last absorbs the worst case of a
    # side hardly longer than its rank. A loop, since factorizations are slow to compile.
    return jax.lax.fori_loop(0, 4, one_pass, y)
