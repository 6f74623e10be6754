"""What a user may write as a target, a table or a rank, and what a slip says."""

import inspect
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._checks import check_choice, check_rank
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.target import Target

PARAMS = {"a": jnp.zeros((16, 24)), "b": jnp.zeros((24, 16)), "norm": jnp.zeros(24)}


def plan_of(targets, params=None, rank=4, side="smaller"):
    """``{path: rank}`` of what is projected."""
    plan = make_plan(PARAMS if params is None else params, targets, rank, side)
    return {leaf.path: leaf.rank for leaf in plan.leaves if leaf.is_target}


def raises(kind, message):
    """The whole message, to the letter."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


# Ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "kind", "message"),
    [
        (0, ValueError, "rank=0 projects onto nothing; use a rank of at least 1"),
        (-3, ValueError, "rank=-3 projects onto nothing; use a rank of at least 1"),
        (True, TypeError, "rank must be an int or a float, got bool True"),
        ("8", TypeError, "rank must be an int or a float, got str '8'"),
        (None, TypeError, "rank must be an int or a float, got NoneType None"),
        (
            128.0,
            ValueError,
            "rank=128.0 as a float is a fraction of the smaller side, in (0, 1]; "
            "for 128 columns write rank=128",
        ),
        (
            0.0,
            ValueError,
            "rank=0.0 as a float is a fraction of the smaller side, in (0, 1]; "
            "for 0 columns write rank=1",
        ),
        (
            float("nan"),
            ValueError,
            "rank=nan is not a rank; use an int, or a fraction in (0, 1]",
        ),
        (
            float("inf"),
            ValueError,
            "rank=inf is not a rank; use an int, or a fraction in (0, 1]",
        ),
    ],
)
def test_rank_errors(rank, kind, message):
    with raises(kind, message):
        check_rank(rank)


@pytest.mark.parametrize("rank", [1, 128, np.int64(3), 1.0, 0.25, np.float32(0.5)])
def test_ranks(rank):
    check_rank(rank)


def test_array_ranks_name_static_args():
    message = (
        "Target: rank must be a Python number, got an array 8; it decides shapes, so it cannot "
        "change between steps. Under optax.inject_hyperparams name it in static_args, e.g. "
        "static_args=('rank',)"
    )
    with raises(TypeError, message):
        check_rank(jnp.asarray(8), "Target: rank")
    with pytest.raises(TypeError, match=re.escape("static_args=('rank',)")):
        jax.jit(lambda rank: check_rank(rank, "refresh_basis: rank"))(8)
    with pytest.raises(TypeError, match=re.escape("static_args=('rank',)")):
        inspect.unwrap(lro.refresh_basis)(jnp.asarray(8))


def test_inject_hyperparams_with_static_args():
    make = optax.inject_hyperparams(
        lro.galore_adamw, static_args=("rank", "refresh_every", "method", "side", "seed")
    )
    state = make(1e-2, rank=4).init({"kernel": jnp.zeros((16, 24))})
    (tracker,) = [
        node
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, lro.TrackerState))
        if isinstance(node, lro.TrackerState)
    ]
    assert tracker.reduction_basis["kernel"].shape == (16, 4)


@pytest.mark.parametrize(
    ("rank", "columns"),
    [(4, 4), (0.25, 4), (0.5, 8), (1.0, 16), (0.01, 1), (16, 16), (1000, 16), (np.int32(3), 3)],
)
def test_rank_is_a_share_of_the_smaller_side_and_clamped(rank, columns):
    for path in ("a", "b"):
        plan = make_plan(PARAMS, [(f"^{path}$", rank)], 4, "smaller")
        (leaf,) = [leaf for leaf in plan.leaves if leaf.is_target]
        # At the full rank there is no basis to store.
        assert leaf.rank == (0 if columns == 16 else columns)
        assert bool(leaf.sides) is (columns < 16)


# Targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"rank": 0}, ValueError, "Target: rank=0 projects onto nothing; use a rank of at least 1"),
        ({"rank": True}, TypeError, "Target: rank must be an int or a float, got bool True"),
        (
            {"side": "left"},
            ValueError,
            "Target: side='left' is not one of 'smaller', 'larger', 'reduction', 'output', 'both'",
        ),
        (
            {"reduction_axis": 0},
            ValueError,
            "Target: only reduction_axis was given; give both reduction_axis and output_axis, "
            "or neither to read the view off the leaf's path",
        ),
        (
            {"output_axis": (1, 2)},
            ValueError,
            "Target: only output_axis was given; give both reduction_axis and output_axis, "
            "or neither to read the view off the leaf's path",
        ),
    ],
)
def test_target_errors(arguments, kind, message):
    with raises(kind, message):
        inspect.unwrap(Target)(**arguments)


def test_targets_are_values():
    """Lists of axes become tuples, so that a target can be a dictionary key."""
    one, other = Target(4, [0], [1, 2], "both"), Target(4, (0,), (1, 2), "both")
    assert one == other
    assert hash(one) == hash(other)
    assert Target() == Target(None)


def test_axes_that_do_not_fit_name_the_leaf():
    params = {"decoder": {"q": {"kernel": jnp.zeros((64, 4, 16))}}}
    message = (
        "'decoder/q/kernel': reduction_axis=(0,) and output_axis=(0,) overlap for shape "
        "(64, 4, 16); name each axis once, e.g. reduction_axis=0, output_axis=1"
    )
    with raises(ValueError, message):
        plan_of([("q", Target(4, 0, 0))], params)
    with pytest.raises(ValueError, match=r"^'decoder/q/kernel': output_axis=\(3,\) is out of"):
        plan_of([("q", Target(4, 0, 3))], params)


def test_unknown_layout_asks_for_axes():
    params = {"conv": {"kernel": jnp.zeros((3, 3, 16, 32))}}
    message = (
        "'conv/kernel': which of the axes of shape (3, 3, 16, 32) does the layer sum over? No "
        "known layout has this path and shape; say it: lro.Target(rank, reduction_axis=..., "
        "output_axis=...), where axes on neither side are batch axes"
    )
    with raises(ValueError, message):
        plan_of([("conv", 4)], params)
    assert plan_of([("conv", Target(4, (0, 1, 2), 3))], params) == {"conv/kernel": 4}


# Dimension numbers -------------------------------------------------------------------------------


class DimensionNumbers(NamedTuple):
    reduction_axis: object = 0
    output_axis: object = 1


OTHERS = [DimensionNumbers] + [
    getattr(optax.contrib, name)
    for name in ("MuonDimensionNumbers", "GaLoreDimensionNumbers")
    if hasattr(optax.contrib, name)
]


def test_optax_has_dimension_numbers():
    assert len(OTHERS) == 3


@pytest.mark.parametrize("numbers", OTHERS)
def test_dimension_numbers_of_optax(numbers):
    params = {"q": jnp.zeros((16, 4, 8)), "up": jnp.zeros((16, 24))}
    entry = numbers(reduction_axis=0, output_axis=(1, 2))
    for targets in (
        [("q", entry)],
        {"q": entry, "up": None},
        lambda path, leaf: entry if path == "q" else None,
    ):
        plan = make_plan(params, targets, 4, "smaller")
        (leaf,) = [leaf for leaf in plan.leaves if leaf.is_target]
        assert (leaf.path, leaf.rank) == ("q", 4)
        assert (leaf.view.reduction_axes, leaf.view.output_axes) == ((0,), (1, 2))


# Tables ------------------------------------------------------------------------------------------


def test_first_match_wins_and_none_leaves_full_rank():
    assert plan_of([("^a$", 2), ("a|b", 3)]) == {"a": 2, "b": 3}
    assert plan_of([("^a$", None), ("a|b", 3)]) == {"b": 3}
    assert plan_of([("b", Target())], rank=5) == {"b": 5}


def test_regex_is_searched_anywhere_in_the_path():
    params = {"decoder": {"layers_0": {"q": {"kernel": jnp.zeros((16, 24))}}}}
    for pattern in ("q/kernel", "layers_0", "^decoder", r"layers_\d+/q"):
        assert plan_of([(pattern, 4)], params) == {"decoder/layers_0/q/kernel": 4}


def test_vectors_are_never_projected():
    assert plan_of([(".", 4)]) == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        (
            [("a", 4), ("b", 4, 5)],
            TypeError,
            "targets[1] must be a pair (regex, rank | Target | None), got ('b', 4, 5)",
        ),
        (
            ["a", "b"],
            TypeError,
            "targets[0] must be a pair (regex, rank | Target | None), got 'a'",
        ),
        (
            [("a", 4), (3, 4)],
            TypeError,
            "targets[1]: the regex of a rule must be a string, got 3",
        ),
        (
            [("(a", 4)],
            ValueError,
            "targets[0]: '(a' is no regular expression: missing ), unterminated subpattern "
            "at position 0",
        ),
        (
            [("a", "large")],
            TypeError,
            "'a': a target is a lro.Target, a rank, optax dimension numbers or None; got 'large' "
            "(rank must be an int or a float, got str 'large')",
        ),
        (
            [("a", 0)],
            ValueError,
            "'a': a target is a lro.Target, a rank, optax dimension numbers or None; got 0 "
            "(rank=0 projects onto nothing; use a rank of at least 1)",
        ),
    ],
)
def test_table_errors(rules, kind, message):
    with raises(kind, message):
        plan_of(rules)


@pytest.mark.parametrize("targets", [[], [("attention", 4)], [("norm", 4)], lambda *_: None])
def test_targets_that_match_nothing_are_an_error(targets):
    message = (
        "targets matches no matrix among the 3 leaves: 'a', 'b', 'norm'. A regex is searched in "
        "the whole path, e.g. targets=[('mlp', 32)]; lro.describe(tx, params) shows every path"
    )
    with raises(ValueError, message):
        plan_of(targets)


def test_many_paths_are_cut_short():
    params = {f"layer_{i}": jnp.zeros((16, 24)) for i in range(9)}
    with pytest.raises(ValueError, match="'layer_0', 'layer_1', 'layer_2', 'layer_3', "):
        plan_of([("mlp", 4)], params)


@pytest.mark.parametrize("rules", [[("a", 4), ("mlp", 4)], [("a|b", 4), ("^mlp|a$", 4)]])
def test_rule_that_never_matched_warns(rules):
    pattern = re.escape(repr(rules[1][0]))
    with pytest.warns(UserWarning, match=f"rule {pattern} matched no leaf, or only leaves that"):
        plan_of(rules)


# Pytrees and callables ----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [2, 0.125, Target(2), Target(2, 0, 1)])
def test_pytree_targets(entry):
    assert plan_of({"a": entry, "b": None, "norm": None}) == {"a": 2}
    params = [(jnp.zeros((16, 24)), jnp.zeros(24)), (jnp.zeros((24, 16)), jnp.zeros(16))]
    assert plan_of([(None, None), (entry, None)], params) == {"1/0": 2}


def test_pytree_targets_over_none_leaves():
    params = {"a": jnp.zeros((16, 24)), "b": None}
    assert plan_of({"a": 4, "b": None}, params) == {"a": 4}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a": 4}, "targets is a tree of 1 entries for params with 3 leaves; they differ at 'b'"),
        (
            {"a": 4, "b": None, "other": None},
            "targets is a tree of 3 entries for params with 3 leaves; they differ at 'norm'",
        ),
        (Target(4), "targets is a tree of 1 entries for params with 3 leaves; they differ at ''"),
        (
            {"a": {"x": 4}, "b": None, "norm": None},
            "targets is a tree of 3 entries for params with 3 leaves; they differ at 'a'",
        ),
    ],
)
def test_pytree_mismatch(targets, message):
    with pytest.raises(ValueError, match=re.escape(message) + ". Give one Target or None for each"):
        plan_of(targets)


def test_pytree_entry_errors_name_the_leaf():
    with pytest.raises(ValueError, match=r"^'a': a target is a lro.Target, a rank, .*got -1"):
        plan_of({"a": -1, "b": None, "norm": None})


def test_callable_targets():
    seen = {}

    def choose(path, leaf):
        seen[path] = leaf.shape
        return Target(3, side="output") if path == "b" else None

    plan = make_plan(PARAMS, choose, 4, "smaller")
    assert seen == {"a": (16, 24), "b": (24, 16), "norm": (24,)}
    (leaf,) = [leaf for leaf in plan.leaves if leaf.is_target]
    assert (leaf.path, leaf.rank, leaf.sides) == ("b", 3, ("output",))
    assert plan_of(lambda path, leaf: 2 if leaf.ndim == 2 else None) == {"a": 2, "b": 2}
    with pytest.raises(TypeError, match=r"^'a': a target is a lro.Target, .*got 'x'"):
        plan_of(lambda path, leaf: "x")


# Sides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "wide", "tall", "square"),
    [
        ("smaller", ("reduction",), ("output",), ("reduction",)),
        ("larger", ("output",), ("reduction",), ("reduction",)),
        ("reduction", ("reduction",), ("reduction",), ("reduction",)),
        ("output", ("output",), ("output",), ("output",)),
        ("both", ("reduction", "output"), ("reduction", "output"), ("reduction", "output")),
    ],
)
def test_sides(side, wide, tall, square):
    params = {"w": jnp.zeros((16, 24)), "t": jnp.zeros((24, 16)), "s": jnp.zeros((16, 16))}
    of_tracker = make_plan(params, None, 4, side)
    of_target = make_plan(params, [(".", Target(side=side))], 4, "smaller")
    for plan in (of_tracker, of_target):
        sides = {leaf.path: leaf.sides for leaf in plan.leaves}
        assert sides == {"w": wide, "t": tall, "s": square}


def test_check_choice():
    with raises(ValueError, "moments='turn' is not one of 'rotate', 'keep'"):
        check_choice("moments", "turn", ("rotate", "keep"))
    check_choice("moments", "keep", ("rotate", "keep"))
