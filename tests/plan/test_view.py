"""Reading leaves as matrices, against plain reshapes in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_optax._plan.view import OUTPUT, REDUCTION, Bases, View, make_view

# name: (shape, reduction, output, batch)
LEAVES = {
    "dense": ((8, 10), (0,), (1,), ()),
    "transposed": ((10, 8), (1,), (0,), ()),
    "query": ((8, 3, 5), (0,), (1, 2), ()),
    "out": ((3, 5, 8), (0, 1), (2,), ()),
    "stacked query": ((4, 8, 3, 5), (1,), (2, 3), (0,)),
    "stacked out": ((4, 3, 5, 8), (1, 2), (3,), (0,)),
    "stacked in the middle": ((8, 4, 3, 5), (0,), (2, 3), (1,)),
    "experts": ((6, 8, 10), (1,), (2,), (0,)),
    "stacked experts": ((2, 6, 8, 10), (2,), (3,), (0, 1)),
    "kv_einsum": ((2, 3, 8, 5), (2,), (0, 1, 3), ()),
    "interleaved": ((3, 7, 4, 5), (2, 0), (3,), (1,)),
}
RANK = 3
SIDES = {"reduction": (REDUCTION,), "output": (OUTPUT,), "both": (REDUCTION, OUTPUT)}


def case(name, sides, seed=0):
    """A view, a leaf and bases, each also as NumPy batches of plain matrices."""
    shape, reduction, output, batch = LEAVES[name]
    view = make_view(shape, reduction, output)
    assert view.batch_axes == batch
    rng = np.random.default_rng(seed)
    leaf = rng.normal(size=shape)
    count = math.prod(view.batch_shape)
    matrices = leaf.transpose(batch + reduction + output).reshape(count, view.rows, view.columns)
    p = np.linalg.qr(rng.normal(size=(count, view.rows, RANK)))[0] if REDUCTION in sides else None
    q = np.linalg.qr(rng.normal(size=(count, view.columns, RANK)))[0] if OUTPUT in sides else None
    bases = Bases(
        None if p is None else jnp.float32(p.reshape(view.basis_shape(REDUCTION, RANK))),
        None if q is None else jnp.float32(q.reshape(view.basis_shape(OUTPUT, RANK))),
    )
    return view, leaf, matrices, bases, p, q


def core_of(matrices, p, q):
    core = matrices if p is None else p.swapaxes(1, 2) @ matrices
    return core if q is None else core @ q


def as_leaf(matrices, view):
    order = view.batch_axes + view.reduction_axes + view.output_axes
    return matrices.reshape([view.shape[axis] for axis in order]).transpose(np.argsort(order))


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("name", LEAVES)
def test_project_is_a_plain_product(name, sides):
    view, leaf, matrices, bases, p, q = case(name, sides)
    core = view.project(jnp.float32(leaf), bases)
    assert core.shape == view.core_shape(sides, RANK)
    expected = core_of(matrices, p, q).reshape(core.shape)
    np.testing.assert_allclose(core, expected, atol=1e-5)


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("name", LEAVES)
def test_lift_is_a_plain_product(name, sides):
    view, _, matrices, bases, p, q = case(name, sides)
    core = np.random.default_rng(1).normal(size=view.core_shape(sides, RANK))
    lifted = view.lift(jnp.float32(core), bases)
    assert lifted.shape == view.shape
    rows = view.rows if p is None else RANK
    columns = view.columns if q is None else RANK
    expected = core.reshape(len(matrices), rows, columns)
    expected = expected if p is None else p @ expected
    expected = expected if q is None else expected @ q.swapaxes(1, 2)
    np.testing.assert_allclose(lifted, as_leaf(expected, view), atol=1e-5)


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("name", LEAVES)
def test_lift_is_the_adjoint_of_project(name, sides):
    view, leaf, _, bases, _, _ = case(name, sides)
    core = jnp.float32(np.random.default_rng(1).normal(size=view.core_shape(sides, RANK)))
    projected = view.project(jnp.float32(leaf), bases)
    left = np.vdot(np.float64(projected), np.float64(core))
    right = np.vdot(leaf, np.float64(view.lift(core, bases)))
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [REDUCTION, OUTPUT])
@pytest.mark.parametrize("name", LEAVES)
def test_images(name, side):
    view, leaf, matrices, bases, p, q = case(name, (side,))
    images = view.images(jnp.float32(leaf), side, getattr(bases, side))
    other = OUTPUT if side == REDUCTION else REDUCTION
    assert images.shape == view.basis_shape(other, RANK)
    expected = matrices.swapaxes(1, 2) @ p if side == REDUCTION else matrices @ q
    np.testing.assert_allclose(images, expected.reshape(images.shape), atol=1e-5)


@pytest.mark.parametrize("name", LEAVES)
def test_as_matrix(name):
    view, leaf, matrices, *_ = case(name, ())
    expected = matrices.reshape(*view.batch_shape, view.rows, view.columns)
    np.testing.assert_array_equal(view.as_matrix(jnp.float32(leaf)), np.float32(expected))


def test_both_is_not_one_product_with_one_basis():
    """``PᵀGQ`` has two bases of different lengths; one Q would not even fit."""
    view, _, _, bases, _, _ = case("query", SIDES["both"])
    assert bases.reduction.shape == (8, RANK)
    assert bases.output.shape == (3, 5, RANK)
    assert view.core_shape(SIDES["both"], RANK) == (RANK, RANK)


def test_mixed_dtypes():
    view, leaf, _, bases, _, _ = case("query", SIDES["reduction"])
    core = view.project(jnp.asarray(leaf, jnp.bfloat16), bases)
    assert core.dtype == jnp.float32
    assert view.lift(core.astype(jnp.bfloat16), bases).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "sides", "axes"),
    [
        ("dense", "reduction", {REDUCTION: 0}),
        ("dense", "output", {OUTPUT: 1}),
        ("dense", "both", {REDUCTION: 0, OUTPUT: 1}),
        ("out", "output", {OUTPUT: 2}),
        ("out", "both", {REDUCTION: 0, OUTPUT: 1}),
        ("stacked out", "output", {OUTPUT: 3}),
        ("stacked experts", "both", {REDUCTION: 2, OUTPUT: 3}),
        ("stacked in the middle", "reduction", {REDUCTION: 1}),
    ],
)
def test_core_axes(name, sides, axes):
    view, *_ = case(name, SIDES[sides])
    assert view.core_axes(SIDES[sides]) == axes
    shape = view.core_shape(SIDES[sides], 99)
    assert all(shape[axis] == 99 for axis in axes.values())
    assert shape.count(99) == len(axes)


def test_sizes():
    view = make_view((2, 8, 3, 5), -3, (-2, -1))
    assert view == View((2, 8, 3, 5), (0,), (1,), (2, 3))
    assert (view.rows, view.columns, view.batch_shape) == (8, 15, (2,))
    assert view.basis_shape(REDUCTION, 4) == (2, 8, 4)
    assert view.basis_shape(OUTPUT, 4) == (2, 3, 5, 4)
    assert hash(view) == hash(make_view([2, 8, 3, 5], [1], [2, 3]))


@pytest.mark.parametrize(
    ("shape", "reduction", "output", "message"),
    [
        (
            (64, 4, 16),
            0,
            0,
            "reduction_axis=(0,) and output_axis=(0,) overlap for shape (64, 4, 16); "
            "name each axis once, e.g. reduction_axis=0, output_axis=1",
        ),
        (
            (64, 4, 16),
            (0, -3),
            1,
            "reduction_axis=(0, 0) and output_axis=(1,) overlap for shape (64, 4, 16); "
            "name each axis once, e.g. reduction_axis=0, output_axis=1",
        ),
        (
            (64, 4),
            2,
            0,
            "reduction_axis=(2,) is out of range for shape (64, 4) with 2 axes; "
            "use numbers from -2 to 1",
        ),
        (
            (64, 4),
            0,
            (1, -3),
            "output_axis=(1, -3) is out of range for shape (64, 4) with 2 axes; "
            "use numbers from -2 to 1",
        ),
        ((64, 4), (), 0, "reduction_axis=() names no axis of shape (64, 4); name at least one"),
        ((64, 4), 0, [], "output_axis=() names no axis of shape (64, 4); name at least one"),
    ],
)
def test_errors(shape, reduction, output, message):
    with pytest.raises(ValueError, match="axis") as caught:
        make_view(shape, reduction, output)
    assert str(caught.value) == message
