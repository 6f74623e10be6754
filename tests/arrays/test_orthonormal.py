"""Orthonormal columns for any finite input, against NumPy in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_optax._arrays.orthonormal import gram, orthonormalize, whiten

# (batch axes, side axes, rank): plain, batched, several side axes, square, one short of square.
SHAPES = [
    ((), (64,), 8),
    ((), (9,), 8),
    ((), (8,), 8),
    ((), (40,), 1),
    ((), (6, 7), 5),
    ((3,), (32,), 8),
    ((3,), (4, 8), 31),
    ((2, 3), (24,), 6),
]
DEFECTS = ["none", "zero", "duplicates", "rank 1", "null column", "graded", "one batch zero"]


@functools.partial(jax.jit, static_argnums=2)
def orth(y, fill, batch_ndim):
    return orthonormalize(y, fill, batch_ndim)


def draw(shape, defect, seed):
    """A matrix with one of the defects, entries of about 1, and its numerical rank or None."""
    batch, side, rank = shape
    rows = math.prod(side)
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(*batch, rows, rank))
    if defect == "zero":
        y[:] = 0
    elif defect == "duplicates":
        y[..., rank // 2 :] = y[..., : rank - rank // 2]
    elif defect == "rank 1":
        y = y[..., :1] * rng.normal(size=(*batch, 1, rank))
    elif defect == "null column":
        y[..., rank // 2] = 0
    elif defect == "graded":
        y = y * np.logspace(0, -12, rank)
    elif defect == "one batch zero" and batch:
        y[(0,) * len(batch)] = 0
    return y.reshape(*batch, *side, rank)


def flat(x, batch_ndim):
    x = np.asarray(x, np.float64)
    return x.reshape(-1, math.prod(x.shape[batch_ndim:-1]), x.shape[-1])


def check(y, q, batch_ndim, dtype=np.float32):
    """Orthonormal, finite, and the range of ``y`` is inside the span of ``q``."""
    assert q.shape == y.shape
    assert q.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    for matrix, basis in zip(flat(y, batch_ndim), flat(q, batch_ndim), strict=True):
        assert np.isfinite(basis).all()
        defect = basis.T @ basis - np.eye(basis.shape[1])
        assert np.abs(defect).max() < tolerance
        left, values, _ = np.linalg.svd(matrix, full_matrices=False)
        # Directions that the dtype cannot tell from rounding errors are nobody's loss.
        seen = left[:, values > values[0] * (3e-3 if dtype == np.float32 else 1e-6)]
        if values[0] > 0:
            residual = seen - basis @ (basis.T @ seen)
            assert np.linalg.norm(residual, axis=0).max() < (1e-2 if dtype == np.float32 else 1e-4)


@given(
    shape=st.sampled_from(SHAPES),
    defect=st.sampled_from(DEFECTS),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
)
def test_orthonormalize(shape, defect, exponent, seed):
    batch, side, _ = shape
    y = jnp.asarray(draw(shape, defect, seed) * 10.0**exponent, jnp.float32)
    rng = np.random.default_rng(seed + 1)
    fill = jnp.asarray(rng.normal(size=y.shape) / math.prod(side) ** 0.5, jnp.float32)
    check(y, orth(y, fill, len(batch)), len(batch))


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_defect_in_every_shape(shape, defect):
    batch, side, _ = shape
    y = jnp.asarray(draw(shape, defect, 0), jnp.float32)
    fill = np.random.default_rng(1).normal(size=y.shape) / math.prod(side) ** 0.5
    check(y, orth(y, jnp.asarray(fill, jnp.float32), len(batch)), len(batch))


def test_span_is_that_of_numpy_qr():
    """A well-conditioned matrix: the same subspace as QR's to float32 precision."""
    y = np.random.default_rng(0).normal(size=(50, 10))
    q = np.asarray(orth(jnp.float32(y), jnp.zeros((50, 10)), 0), np.float64)
    reference, _ = np.linalg.qr(y)
    np.testing.assert_allclose(q @ q.T, reference @ reference.T, atol=2e-6)


@pytest.mark.parametrize(("condition", "tolerance"), [(1e2, 1e-3), (3e2, 1e-2)])
def test_weak_directions_stay(condition, tolerance):
    """A direction hundreds of times weaker than the first is signal and not rounding."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(80, 8)))
    right, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    y = left * np.geomspace(1, 1 / condition, 8) @ right
    fill = jnp.asarray(rng.normal(size=y.shape) / 80**0.5, jnp.float32)
    q = np.asarray(orth(jnp.float32(y), fill, 0), np.float64)
    assert np.linalg.norm(left - q @ (q.T @ left), axis=0).max() < tolerance


def test_fill_replaces_null_directions():
    """Of a zero matrix the span is the fill's; of a full-rank one the fill leaves no trace."""
    rng = np.random.default_rng(0)
    fill = jnp.asarray(rng.normal(size=(40, 4)) / 40**0.5, jnp.float32)
    reference, _ = np.linalg.qr(np.asarray(fill, np.float64))
    q = np.asarray(orth(jnp.zeros((40, 4)), fill, 0), np.float64)
    np.testing.assert_allclose(q @ q.T, reference @ reference.T, atol=1e-5)
    y = jnp.asarray(rng.normal(size=(40, 4)), jnp.float32)
    np.testing.assert_allclose(orth(y, fill, 0), orth(y, 100 * fill, 0), atol=1e-5)


def test_scale_does_not_matter():
    y = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4)), jnp.float32)
    fill = jnp.zeros_like(y)
    # Powers of two, so that not even rounding differs.
    for exponent in (-100, -20, 20, 100):
        np.testing.assert_array_equal(orth(y * 2.0**exponent, fill, 0), orth(y, fill, 0))


@pytest.mark.parametrize("shape", [((), (9,), 8), ((2,), (4, 8), 5)], ids=str)
@pytest.mark.parametrize("defect", ["none", "zero", "rank 1", "graded"])
def test_float64(shape, defect):
    with jax.enable_x64(True):
        batch, side, _ = shape
        y = jnp.asarray(draw(shape, defect, 0), jnp.float64)
        fill = np.random.default_rng(1).normal(size=y.shape) / math.prod(side) ** 0.5
        check(y, orth(y, jnp.asarray(fill), len(batch)), len(batch), np.float64)


def test_batch_axes_are_a_vmap():
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.normal(size=(3, 4, 5, 6)), jnp.float32).at[1].set(0)
    fill = jnp.asarray(rng.normal(size=y.shape) / 20**0.5, jnp.float32)
    np.testing.assert_allclose(orth(y, fill, 1), jax.vmap(orthonormalize)(y, fill), atol=2e-6)


def test_whiten():
    """Columns of full rank come out orthonormal; null ones near 0, and nothing is NaN."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(64, 6))
    q = np.asarray(whiten(jnp.float32(y)), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-4)
    q = np.asarray(whiten(jnp.float32(y * 1e-4 + 1), well_conditioned=False), np.float64)
    assert np.isfinite(q).all()
    y[:, 3:] = y[:, :3]
    q = np.asarray(whiten(jnp.float32(y)), np.float64)
    values = np.linalg.svd(q, compute_uv=False)
    np.testing.assert_allclose(values[:3], 1, atol=1e-3)
    assert values[3:].max() < 0.5
    np.testing.assert_array_equal(whiten(jnp.zeros((8, 3))), 0)


def test_whiten_promised_condition():
    y = np.random.default_rng(0).normal(size=(64, 6))
    q = np.asarray(whiten(jnp.float32(y), well_conditioned=True), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(6), atol=2e-6)


def test_gram():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4, 5))
    expected = np.einsum("bijy,bijz->byz", left, right)
    np.testing.assert_allclose(gram(jnp.float32(left), jnp.float32(right), 1), expected, rtol=1e-4)
