r"""Steps of gradient descent on bases: the linear autoencoder of gradients.

An encoder V and a decoder U stand for G by :math:`U V^T G`, at the loss

.. math:: \ell(U, V) = \|G - U V^T G\|^2 / \|G\|^2

With :math:`S = G G^T / \|G\|^2`, which has trace 1 whatever the unit of G,

.. math:: \tfrac{\partial \ell}{\partial U} = -2\,(S V - U\,V^T S V), \qquad
          \tfrac{\partial \ell}{\partial V} = -2\,(S U - S V\,U^T U)

and for an orthonormal P = U = V the second is 0 and the first Oja's :math:`-2(I - PP^T)SP`. S is
never formed: ``S V`` takes two products of G with a thin matrix.

Steps are damped, :math:`X \leftarrow X - \eta\,\partial\ell/\partial X\,(I + 2\eta H)^{-1}` with
an r by r curvature H, so that no learning rate is too large: they are plain gradient descent for
a small one and tend to a power iteration for a large one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import STEP_PRECISION
from lowrank_optax._arrays.norms import norm
from lowrank_optax._arrays.orthonormal import gram, inverse, orthonormalize, times
from lowrank_optax._plan.view import View, other


def matrix_norms(matrix: Float[Array, "..."], view: View) -> Float[Array, "*batch"]:
    """The Frobenius norm of each matrix of a leaf; 1 where that is 0, so that it can divide."""
    axes = view.reduction_axes + view.output_axes
    norms = jnp.squeeze(norm(matrix, axes), axes)
    return jnp.where(norms > 0, norms, 1)


def _curved(
    directions: Float[Array, "*rows r"],
    view: View,
    side: str,
    gradient: Float[Array, "..."],
    norms: Float[Array, "*batch"],
) -> tuple[Float[Array, "..."], Float[Array, "*rows r"]]:
    """``Gᵀ X / ‖G‖`` and ``S X``."""

    def divided(thin: Array) -> Array:
        return thin / norms.reshape(norms.shape + (1,) * (thin.ndim - norms.ndim))

    images = divided(view.images(gradient, side, directions, STEP_PRECISION))
    return images, divided(view.images(gradient, other(side), images, STEP_PRECISION))


def damping(
    curvature: Float[Array, "*batch r r"], learning_rate: Float[Array, ""]
) -> Float[Array, "*batch r r"]:
    """``2η (I + 2ηH)⁻¹`` for a positive semidefinite H: a step size in every direction."""
    identity = jnp.eye(curvature.shape[-1], dtype=curvature.dtype)
    rate = 2 * learning_rate.astype(curvature.dtype)
    return rate * inverse(identity + rate * curvature)


def tied_step(
    gradient: Float[Array, "..."],
    view: View,
    side: str,
    basis: Float[Array, "*rows r"],
    learning_rate: Float[Array, ""],
) -> Float[Array, "*rows r"]:
    r"""One step of Oja's descent, not yet normalised.

    .. math:: P + 2\eta\,(I - PP^T)\,S P\,(I + 2\eta\,P^T S P)^{-1}

    Args:
        gradient: the leaf-shaped gradient G, of any scale.
        view: how to read it.
        side: the side that the basis lives on.
        basis: P.
        learning_rate: :math:`\eta`, relative to S of trace 1.

    Returns:
        An array of the shape of ``basis``.

    References:
        Oja, `A simplified neuron model as a principal component analyzer
        <https://doi.org/10.1007/BF00275687>`_, 1982
    """
    batch_ndim = len(view.batch_axes)
    images, curved = _curved(basis, view, side, gradient, matrix_norms(gradient, view))
    inside = gram(images, images, batch_ndim)
    tangent = curved - times(basis, inside, batch_ndim)
    return basis + times(tangent, damping(inside, learning_rate), batch_ndim)


def untied_step(
    gradient: Float[Array, "..."],
    view: View,
    side: str,
    encoder: Float[Array, "*rows r"],
    decoder: Float[Array, "*rows r"],
    learning_rate: Float[Array, ""],
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"]]:
    """One step of gradient descent on both matrices of the autoencoder, not yet normalised.

    Args:
        gradient: the leaf-shaped gradient G, of any scale.
        view: how to read it.
        side: the side that the matrices live on.
        encoder: V.
        decoder: U.
        learning_rate: relative to S of trace 1.

    Returns:
        The new V and U.
    """
    batch_ndim, rank = len(view.batch_axes), encoder.shape[-1]
    both = jnp.concatenate([encoder, decoder], axis=-1)
    images, curved = _curved(both, view, side, gradient, matrix_norms(gradient, view))
    encoded = images[..., :rank]
    of_encoder, of_decoder = curved[..., :rank], curved[..., rank:]
    inside = gram(encoded, encoded, batch_ndim)
    squares = gram(decoder, decoder, batch_ndim)
    # The loss is quadratic in U with curvature VᵀSV; in V with S ⊗ UᵀU, and S has no
    # eigenvalue above 1.
    decoder_descent = of_encoder - times(decoder, inside, batch_ndim)
    encoder_descent = of_decoder - times(of_encoder, squares, batch_ndim)
    return (
        encoder + times(encoder_descent, damping(squares, learning_rate), batch_ndim),
        decoder + times(decoder_descent, damping(inside, learning_rate), batch_ndim),
    )


def learned(
    gradient: Float[Array, "..."],
    view: View,
    side: str,
    encoder: Float[Array, "*rows r"],
    decoder: Float[Array, "*rows r"] | None,
    fill: Float[Array, "*rows r"],
    learning_rate: Float[Array, ""],
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"] | None]:
    """The encoder and the decoder after one step, their columns orthonormal.

    Args:
        gradient: the leaf-shaped gradient G, of any scale.
        view: how to read it.
        side: the side that the matrices live on.
        encoder: V.
        decoder: U, or None where V does both.
        fill: random directions that replace null ones.
        learning_rate: relative to S of trace 1.

    Returns:
        The new V, and the new U or None.
    """
    batch_ndim = len(view.batch_axes)
    if decoder is None:
        new = tied_step(gradient, view, side, encoder, learning_rate)
        return orthonormalize(new, fill, batch_ndim), None
    pair = untied_step(gradient, view, side, encoder, decoder, learning_rate)
    new, lifts = (orthonormalize(x, fill, batch_ndim) for x in pair)
    return new, lifts
