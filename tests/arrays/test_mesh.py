"""Placements in names, without a mesh."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from lowrank_optax._arrays.mesh import axis_names, fit, spec_of, spread

MESH = {"x": 4, "y": 2}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (P(), [(), ()]),
        (P("x"), [("x",), ()]),
        (P(None, "y"), [(), ("y",)]),
        (P(("x", "y"), None), [("x", "y"), ()]),
        (P(P.UNCONSTRAINED, "x"), [(), ("x",)]),
    ],
)
def test_names_of_a_spec(spec, names):
    assert axis_names(spec, 2) == names


def test_spec_of_names():
    assert spec_of([("x",), (), ("y", "z")]) == P("x", None, ("y", "z"))


def test_names_that_do_not_divide_go():
    assert fit([("x",), ("y",)], (8, 3), MESH) == [("x",), ()]
    assert fit([("x", "y")], (4,), MESH) == [("x",)]


def test_left_over_axes_divide_the_largest_axis():
    # The core of a (16, 32) weight with sharded rows: (r, 32).
    assert spread([(), ()], [None, 1], (4, 32), [("x",), ()], MESH) == [(), ("x",)]
    # Behind what is there already.
    assert spread([(), ("y",)], [None, 1], (4, 32), [("x",), ("y",)], MESH) == [(), ("y", "x")]
    # Rank axes stay whole, however well they would divide.
    assert spread([(), ()], [None, 1], (8, 3), [("x",), ()], MESH) == [(), ()]


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
placements = st.sampled_from(
    [[(), ()], [("x",), ()], [(), ("y",)], [("x",), ("y",)], [("x", "y"), ()], [(), ("y", "x")]]
)


@given(sizes, sizes, placements, st.sampled_from([(0, None), (None, 1), (0, 1)]))
def test_a_spread_placement_is_valid(rows, columns, of_parameter, axes):
    shape = (rows, columns)
    own = fit([() if a is None else of_parameter[a] for a in axes], shape, MESH)
    result = spread(own, axes, shape, of_parameter, MESH)
    names = [name for part in result for name in part]
    assert len(set(names)) == len(names)
    assert set(names) <= {name for part in of_parameter for name in part}
    for size, part, before, axis in zip(shape, result, own, axes, strict=True):
        assert size % math.prod(MESH[name] for name in part) == 0
        assert part[: len(before)] == before
        assert axis is not None or part == ()
