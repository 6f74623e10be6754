"""Descent on bases: the kernels against NumPy and against the gradient of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_optax._bases import autoencoder
from lowrank_optax._plan.view import make_view
from tests.helpers.data import normal

VIEW = make_view((6, 10), 0, 1)
STACK = make_view((3, 6, 10), 1, 2)
GRADIENT = normal(0, (6, 10))


def orthonormal(seed, *shape):
    return jnp.asarray(np.linalg.qr(np.asarray(normal(seed, shape)))[0])


P = orthonormal(1, 6, 2)
V, U = P + 0.1 * normal(2, (6, 2)), P - 0.1 * normal(3, (6, 2))


def loss(encoder, decoder, g):
    with jax.numpy_dtype_promotion("standard"):
        return jnp.sum((g - decoder @ (encoder.T @ g)) ** 2) / jnp.sum(g**2)


def rate(x):
    return jnp.asarray(x, jnp.float32)


def test_a_small_tied_step_is_ojas_descent():
    g, p = np.asarray(GRADIENT, np.float64), np.asarray(P, np.float64)
    s = g @ g.T / np.sum(g**2)
    descent = 2 * (np.eye(6) - p @ p.T) @ s @ p
    step = autoencoder.tied_step(GRADIENT, VIEW, "reduction", P, rate(1e-2)) - P
    np.testing.assert_allclose(step / 1e-2, descent, atol=2e-2 * np.abs(descent).max())
    # Of the loss it is the gradient with respect to the subspace.
    slope = jax.grad(lambda p: loss(p, p, GRADIENT))(P)
    tangent = slope - P @ (P.T @ slope)
    np.testing.assert_allclose(-descent, tangent, atol=1e-5)


@pytest.mark.parametrize("eta", [0.3, 10.0])
def test_a_tied_step_is_damped_by_the_curvature(eta):
    g, p = np.asarray(GRADIENT, np.float64), np.asarray(P, np.float64)
    s = g @ g.T / np.sum(g**2)
    damped = np.linalg.inv(np.eye(2) + 2 * eta * p.T @ s @ p)
    expected = p + 2 * eta * (s @ p - p @ (p.T @ s @ p)) @ damped
    got = autoencoder.tied_step(GRADIENT, VIEW, "reduction", P, rate(eta))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_large_tied_step_is_a_power_iteration():
    g, p = np.asarray(GRADIENT, np.float64), np.asarray(P, np.float64)
    power = np.linalg.qr(g @ g.T @ p)[0]
    got = autoencoder.tied_step(GRADIENT, VIEW, "reduction", P, rate(1e4))
    got = np.linalg.qr(np.asarray(got, np.float64))[0]
    np.testing.assert_allclose(got @ got.T, power @ power.T, atol=2e-3)


def test_small_untied_steps_are_descent_on_both_matrices():
    encoder, decoder = autoencoder.untied_step(GRADIENT, VIEW, "reduction", V, U, rate(1e-3))
    slopes = jax.grad(loss, argnums=(0, 1))(V, U, GRADIENT)
    for new, old, slope in zip((encoder, decoder), (V, U), slopes, strict=True):
        np.testing.assert_allclose((old - new) / 1e-3, slope, atol=1e-2)


@pytest.mark.parametrize("eta", [0.1, 1.0, 100.0])
def test_untied_steps_lower_the_loss_at_any_rate(eta):
    encoder, decoder = V, U
    losses = [float(loss(encoder, decoder, GRADIENT))]
    for _ in range(5):
        encoder, decoder = autoencoder.untied_step(
            GRADIENT, VIEW, "reduction", encoder, decoder, rate(eta)
        )
        losses.append(float(loss(encoder, decoder, GRADIENT)))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("scale", [1e-25, 1e-5, 1e25])
def test_steps_do_not_depend_on_the_gradients_unit(scale):
    expected = autoencoder.tied_step(GRADIENT, VIEW, "reduction", P, rate(3.0))
    with jax.numpy_dtype_promotion("standard"):
        got = autoencoder.tied_step(scale * GRADIENT, VIEW, "reduction", P, rate(3.0))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_other_side_and_batches_are_the_same_matrix_by_matrix():
    gradients = normal(5, (3, 6, 10)).at[1].set(0.0)
    bases = jnp.stack([orthonormal(i, 10, 2) for i in range(3)])
    got = autoencoder.tied_step(gradients, STACK, "output", bases, rate(3.0))
    for i in range(3):
        transposed = make_view((10, 6), 0, 1)
        one = autoencoder.tied_step(gradients[i].T, transposed, "reduction", bases[i], rate(3.0))
        np.testing.assert_allclose(got[i], one, atol=1e-5)
    # An expert that saw no token learns nothing.
    np.testing.assert_array_equal(got[1], bases[1])


def test_matrix_norms_neither_overflow_nor_vanish():
    exact = np.linalg.norm(np.asarray(GRADIENT, np.float64))
    for scale in (1e-30, 1.0, 1e30):
        got = autoencoder.matrix_norms((np.float32(scale) * GRADIENT).astype(jnp.float32), VIEW)
        assert float(got) == pytest.approx(scale * exact, rel=1e-5)
    assert float(autoencoder.matrix_norms(jnp.zeros((6, 10)), VIEW)) == 1
