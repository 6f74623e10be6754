"""``fidelity``: one target's gradient and its approximation, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_optax._subspace.metrics import Fidelity, fidelity

RNG = np.random.default_rng(0)
G = RNG.normal(size=(20, 30))
P = np.linalg.qr(RNG.normal(size=(20, 6)))[0]


def run(gradient, core, approximation, dtype=jnp.float32):
    arrays = (jnp.asarray(x, dtype) for x in (gradient, core, approximation))
    result = jax.jit(fidelity)(*arrays)
    assert all(x.shape == () for x in result)
    return Fidelity(*(float(x) for x in result))


def expected(g, c, a):
    lost, norm = np.linalg.norm(g - a), np.linalg.norm(g)
    return Fidelity(
        energy=np.linalg.norm(c) ** 2 / norm**2,
        distortion=lost / norm,
        effective_snr=np.linalg.norm(a) / lost,
        grad_norm_ratio=np.linalg.norm(a) / norm,
        cosine=np.vdot(g, a) / norm / np.linalg.norm(a),
        sign_flip_rate=np.mean(np.sign(g) != np.sign(a)),
    )


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-20, 1e18, 1e30])
def test_projection(scale):
    core = P.T @ G
    found = run(G * scale, core * scale, P @ core * scale)
    for name, value in expected(G, core, P @ core)._asdict().items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name
    # Of an orthonormal basis, one number tells the others.
    error = found.distortion
    assert found.effective_snr == pytest.approx(np.sqrt(1 - error**2) / error, rel=1e-4)
    assert found.energy == pytest.approx(1 - error**2, rel=1e-4)
    assert found.cosine == pytest.approx(found.grad_norm_ratio, rel=1e-4)


def test_any_approximation():
    """An approximation that is no projection: the quantities are independent."""
    approximation = 0.3 * RNG.normal(size=G.shape) + 2 * G
    core = RNG.normal(size=(6, 30))
    found = run(G, core, approximation)
    for name, value in expected(G, core, approximation)._asdict().items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(("snr", "percent"), [(50, 2.0), (30, 3.33), (10, 9.95)])
def test_snr_of_50_is_an_error_of_2_percent(snr, percent):
    """A gradient whose share outside the subspace is known."""
    inside = P @ (P.T @ G)
    outside = G - inside
    error = 1 / np.sqrt(snr**2 + 1)
    g = inside / np.linalg.norm(inside) * np.sqrt(1 - error**2)
    g = g + outside / np.linalg.norm(outside) * error
    found = run(g, P.T @ g, P @ (P.T @ g))
    assert found.effective_snr == pytest.approx(snr, rel=1e-3)
    assert 100 * found.distortion == pytest.approx(percent, abs=0.01)


def test_zero_gradient_loses_nothing():
    zero = np.zeros((4, 5))
    assert run(zero, np.zeros((2, 5)), zero) == Fidelity(
        energy=1.0,
        distortion=0.0,
        effective_snr=1e7,
        grad_norm_ratio=1.0,
        cosine=1.0,
        sign_flip_rate=0.0,
    )


def test_exact_approximation():
    found = run(G, G, G)
    assert found == pytest.approx((1.0, 0.0, 1e7, 1.0, 1.0, 0.0), rel=1e-6)


def test_approximation_by_zero():
    zero = np.zeros_like(G)
    assert run(G, np.zeros((6, 30)), zero) == (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)


def test_opposite():
    found = run(G, -G, -G)
    assert found.cosine == pytest.approx(-1)
    assert found.distortion == pytest.approx(2)
    assert found.sign_flip_rate == 1


def test_sign_flip_rate_counts_entries():
    gradient = np.asarray([[1.0, 2.0, -3.0, 4.0]])
    approximation = np.asarray([[1.0, -2.0, -3.0, 0.5]])
    assert run(gradient, gradient, approximation).sign_flip_rate == 0.25


def test_bfloat16_gradient_is_measured_in_float32():
    gradient = jnp.asarray(G, jnp.bfloat16)
    exact = np.asarray(gradient, np.float64)
    core = P.T @ exact
    result = fidelity(gradient, jnp.float32(core), jnp.float32(P @ core))
    assert all(x.dtype == jnp.float32 for x in result)
    reference = expected(exact, core, P @ core)
    assert float(result.distortion) == pytest.approx(reference.distortion, rel=1e-4)
    assert float(result.energy) == pytest.approx(reference.energy, rel=1e-4)


@pytest.mark.parametrize("value", [1e-38, 1e-44, 3e38])
def test_finite_at_the_ends_of_the_range(value):
    gradient = np.zeros((4, 5))
    gradient[0, 0] = value
    found = run(gradient, gradient[:1], gradient)
    assert np.isfinite(found).all()
