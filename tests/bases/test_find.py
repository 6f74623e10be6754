"""What each method captures, against NumPy's SVD."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_optax._bases import find as methods
from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, make_view

VIEWS = {
    "wide": make_view((24, 40), 0, 1),
    "heads": make_view((32, 4, 6), 0, (1, 2)),
    "experts": make_view((2, 3, 24, 30), 2, 3),
    "stack in the middle": make_view((32, 3, 4, 6), 0, (2, 3)),
}
SIDES = [REDUCTION, OUTPUT]
RANK = 6
FLOAT32 = jnp.dtype("float32")


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def new_basis(method, gradient, view, side, basis, seed, first):
    return methods.new_basis(method, gradient, view, side, basis, jax.random.key(seed), first)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def random_basis(seed, view, side, rank, dtype=FLOAT32):
    return methods.random_basis(jax.random.key(seed), view, side, rank, dtype)


def as_leaf(matrices, view):
    """Puts a batch of matrices into the leaf's own axis order."""
    order = view.batch_axes + view.reduction_axes + view.output_axes
    sizes = [view.shape[axis] for axis in order]
    return matrices.reshape(sizes).transpose(np.argsort(order))


def as_matrices(leaf, view):
    order = view.batch_axes + view.reduction_axes + view.output_axes
    return np.asarray(leaf, np.float64).transpose(order).reshape(-1, view.rows, view.columns)


def as_bases(basis, view, side):
    size = view.rows if side == REDUCTION else view.columns
    return np.asarray(basis, np.float64).reshape(-1, size, basis.shape[-1])


def gradient_of(view, spectrum, seed=0):
    """A leaf whose matrices have given singular values, and their left and right vectors."""
    rng = np.random.default_rng(seed)
    count = math.prod(view.batch_shape)
    left = np.linalg.qr(rng.normal(size=(count, view.rows, view.rows)))[0][..., : len(spectrum)]
    right = np.linalg.qr(rng.normal(size=(count, view.columns, view.columns)))[0]
    matrices = left * spectrum @ right[..., : len(spectrum)].swapaxes(1, 2)
    return jnp.asarray(as_leaf(matrices, view), jnp.float32)


def captured(gradient, basis, view, side):
    """The energy in the basis as a share of what the best basis of that rank holds."""
    shares = []
    for matrix, p in zip(as_matrices(gradient, view), as_bases(basis, view, side), strict=True):
        core = p.T @ matrix if side == REDUCTION else matrix @ p
        best = np.linalg.svd(matrix, compute_uv=False)[: p.shape[1]]
        shares.append(np.sum(core**2) / np.sum(best**2))
    return min(shares)


def check_orthonormal(basis, view, side, tolerance=1e-5):
    assert basis.shape == view.basis_shape(side, basis.shape[-1])
    for p in as_bases(basis, view, side):
        np.testing.assert_allclose(p.T @ p, np.eye(p.shape[1]), atol=tolerance)


FEW = ["wide", "stack in the middle"]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FEW)
def test_captured_energy_from_a_cold_start(name, side):
    view = VIEWS[name]
    start = random_basis(0, view, side, RANK)
    spectra = {"geometric": 0.7 ** np.arange(20), "power law": 1 / np.arange(1.0, 21)}
    for spectrum in spectra.values():
        for scale in (1.0, 1e-20, 1e18):
            gradient = gradient_of(view, spectrum * scale)
            basis = new_basis("subspace", gradient, view, side, start, 1, True)
            check_orthonormal(basis, view, side)
            assert captured(gradient, basis, view, side) > 0.99


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rank", [1, 3, RANK])
def test_low_rank_gradient_is_recovered_exactly(side, rank):
    """Also where it has fewer directions than the basis, as early gradients have."""
    for name in FEW:
        view = VIEWS[name]
        gradient = gradient_of(view, np.linspace(1, 0.5, rank))
        start = random_basis(0, view, side, RANK)
        basis = new_basis("subspace", gradient, view, side, start, 1, True)
        check_orthonormal(basis, view, side)
        bases = Bases(**{side: basis})
        restored = view.lift(view.project(gradient, bases), bases)
        np.testing.assert_allclose(restored, gradient, atol=2e-6)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FEW)
def test_warm_start_finds_an_orthogonal_subspace(name, side):
    """One refresh, one iteration, from a basis that has nothing in common with the gradient."""
    view = VIEWS[name]
    rng = np.random.default_rng(0)
    size = view.rows if side == REDUCTION else view.columns
    other = view.columns if side == REDUCTION else view.rows
    count = math.prod(view.batch_shape)
    frames = np.linalg.qr(rng.normal(size=(count, size, size)))[0]
    old, new = frames[..., :RANK], frames[..., RANK : 2 * RANK]
    matrices = new @ rng.normal(size=(count, RANK, other))
    if side == OUTPUT:
        matrices = matrices.swapaxes(1, 2)
    gradient = jnp.asarray(as_leaf(matrices, view), jnp.float32)
    basis = jnp.asarray(old.reshape(view.basis_shape(side, RANK)), jnp.float32)
    assert captured(gradient, basis, view, side) < 1e-10
    basis = new_basis("subspace", gradient, view, side, basis, 1, False)
    check_orthonormal(basis, view, side)
    assert captured(gradient, basis, view, side) > 0.999


@pytest.mark.parametrize("side", SIDES)
def test_warm_start_finds_what_it_is_exactly_zero_on(side):
    """Other rows of the gradient light up: not even rounding errors lead from old to new."""
    view = VIEWS["wide"]
    rng = np.random.default_rng(0)
    size, other = (24, 40) if side == REDUCTION else (40, 24)
    matrix = np.zeros((size, other))
    matrix[RANK : 2 * RANK] = rng.normal(size=(RANK, other))
    gradient = jnp.asarray(matrix if side == REDUCTION else matrix.T, jnp.float32)
    basis = new_basis("subspace", gradient, view, side, jnp.eye(size, RANK), 1, False)
    check_orthonormal(basis, view, side)
    assert captured(gradient, basis, view, side) > 0.999


def test_warm_start_improves_on_a_basis_that_is_nearly_right():
    view = VIEWS["wide"]
    gradient = gradient_of(view, 0.8 ** np.arange(20))
    basis = random_basis(0, view, REDUCTION, RANK)
    shares = []
    for seed in range(8):
        basis = new_basis("subspace", gradient, view, REDUCTION, basis, seed, False)
        shares.append(captured(gradient, basis, view, REDUCTION))
    assert shares[-1] > 0.995
    assert shares[0] < shares[-1]


def test_rotating_subspace_is_followed():
    """The gradient's subspace turns a little at each refresh; the basis stays with it."""
    for side in SIDES:
        view = VIEWS["wide"]
        size, other = (24, 40) if side == REDUCTION else (40, 24)
        rng = np.random.default_rng(0)
        turn = rng.normal(size=(size, size)) * 0.02
        frame = np.linalg.qr(rng.normal(size=(size, RANK)))[0]
        basis = random_basis(0, view, side, RANK)
        for step in range(10):
            frame = np.linalg.qr(frame + (turn - turn.T) @ frame)[0]
            matrix = frame @ rng.normal(size=(RANK, other))
            gradient = jnp.asarray(matrix if side == REDUCTION else matrix.T, jnp.float32)
            basis = new_basis("subspace", gradient, view, side, basis, step, step == 0)
            assert captured(gradient, basis, view, side) > 0.999, (side, step)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FEW)
def test_svd_is_numpys(name, side):
    view = VIEWS[name]
    gradient = gradient_of(view, np.linspace(2, 1, 20))
    basis = jax.jit(methods.singular_vectors, static_argnums=(1, 2, 3))(gradient, view, side, RANK)
    check_orthonormal(basis, view, side)
    for matrix, p in zip(as_matrices(gradient, view), as_bases(basis, view, side), strict=True):
        left, _, right = np.linalg.svd(matrix)
        reference = left[:, :RANK] if side == REDUCTION else right[:RANK].T
        np.testing.assert_allclose(np.abs(np.sum(p * reference, axis=0)), 1, atol=1e-4)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FEW)
def test_gram_spans_what_svd_spans(name, side):
    view = VIEWS[name]
    for scale in (1.0, 1e-25, 1e25):
        gradient = gradient_of(view, 0.8 ** np.arange(20) * scale)
        start = random_basis(0, view, side, RANK)
        gram = new_basis("gram", gradient, view, side, start, 1, True)
        svd = new_basis("svd", gradient, view, side, start, 1, True)
        check_orthonormal(gram, view, side)
        for p, q in zip(as_bases(gram, view, side), as_bases(svd, view, side), strict=True):
            np.testing.assert_allclose(p @ p.T, q @ q.T, atol=1e-4)


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_takes_bfloat16_and_returns_float32(method):
    view = VIEWS["heads"]
    gradient = gradient_of(view, 0.5 ** np.arange(20)).astype(jnp.bfloat16)
    start = random_basis(0, view, REDUCTION, RANK).astype(jnp.bfloat16)
    basis = new_basis(method, gradient, view, REDUCTION, start, 1, True)
    assert basis.dtype == jnp.float32
    check_orthonormal(basis, view, REDUCTION)
    if method != "random":
        assert captured(gradient.astype(jnp.float32), basis, view, REDUCTION) > 0.99


def test_random_bases():
    view = VIEWS["experts"]
    for side in SIDES:
        first, again, other = (random_basis(seed, view, side, RANK) for seed in (0, 0, 1))
        check_orthonormal(first, view, side)
        np.testing.assert_array_equal(first, again)
        overlap = np.linalg.norm(
            as_bases(first, view, side).swapaxes(1, 2) @ as_bases(other, view, side), axis=(1, 2)
        )
        assert (overlap**2 < 0.6 * RANK).all()
        # Each matrix of a batch has a basis of its own.
        stack = as_bases(first, view, side)
        assert np.linalg.norm(stack[0].T @ stack[1]) ** 2 < 0.6 * RANK


def test_random_method_ignores_the_gradient():
    view = VIEWS["wide"]
    start = random_basis(0, view, REDUCTION, RANK)
    nan = jnp.full((24, 40), jnp.nan)
    basis = new_basis("random", nan, view, REDUCTION, start, 1, True)
    check_orthonormal(basis, view, REDUCTION)
    assert np.abs(np.asarray(basis - start)).max() > 0.1


def test_basis_of_nearly_the_whole_space():
    view, rank = VIEWS["wide"], 23
    gradient = gradient_of(view, 0.7 ** np.arange(20))
    start = random_basis(0, view, REDUCTION, rank)
    basis = new_basis("subspace", gradient, view, REDUCTION, start, 1, True)
    check_orthonormal(basis, view, REDUCTION)


def test_float64():
    with jax.enable_x64(True):
        view = VIEWS["wide"]
        gradient = jnp.asarray(
            np.asarray(gradient_of(view, 0.5 ** np.arange(20)), np.float64), jnp.float64
        )
        start = random_basis(0, view, REDUCTION, RANK, jnp.dtype("float64"))
        basis = new_basis("subspace", gradient, view, REDUCTION, start, 1, True)
        assert basis.dtype == jnp.float64
        check_orthonormal(basis, view, REDUCTION, 1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("value", "usable"),
    [
        (1.0, True),
        (-1.0, True),
        (1e-30, True),
        (1e30, True),
        (0.0, False),
        (1e-38, False),
        (np.nan, False),
        (np.inf, False),
        (-np.inf, False),
    ],
)
def test_is_usable(value, usable, dtype):
    gradient = jnp.zeros((4, 5), dtype).at[1, 2].set(value)
    assert bool(methods.is_usable(gradient)) is usable


def test_one_nan_among_large_entries_is_seen():
    assert not methods.is_usable(jnp.full((4, 5), 1e30).at[3, 4].set(jnp.nan))
