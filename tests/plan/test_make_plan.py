"""What is decided once: notes, equality, and a plan's way through JAX, pickle and Flax."""

import copy
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._plan.target import Target
from lowrank_optax._plan.view import make_view

PARAMS = {"bias": jnp.zeros(24), "down": jnp.zeros((24, 16)), "up": jnp.zeros((16, 24))}


def momentum():
    return lro.galore_project(optax.sgd(1e-2, momentum=0.9), lro.refresh_basis(rank=4))


def leaf_of(plan, path):
    return next(leaf for leaf in plan.leaves if leaf.path == path)


# Decisions ---------------------------------------------------------------------------------------


def test_leaf_plans():
    plan = make_plan(PARAMS, None, 4, "smaller")
    up = LeafPlan("up", (16, 24), "float32", make_view((16, 24), 0, 1), ("reduction",), 4)
    down = LeafPlan("down", (24, 16), "float32", make_view((24, 16), 0, 1), ("output",), 4)
    assert plan.leaves == (LeafPlan("bias", (24,), "float32"), down, up)
    assert [(p.number, p.index, p.path) for p in plan.projections] == [(0, 1, "down"), (1, 2, "up")]
    assert [p.core_shape for p in plan.projections] == [(24, 4), (4, 24)]
    assert repr(plan) == "Plan(2 of 3 leaves projected)"


@pytest.mark.parametrize("rank", [16, 99, 1.0])
def test_full_rank_target_is_p_equals_identity(rank):
    plan = make_plan(PARAMS, [("up", rank), ("down", 4)], 4, "smaller")
    up = leaf_of(plan, "up")
    assert up.note == "P = I: the rank is the full rank"
    assert (up.sides, up.rank) == ((), 0)
    assert up.is_target
    assert [p.index for p in plan.projections] == [1]


def test_p_equals_identity_stores_no_basis():
    tracker = lro.refresh_basis(targets=[("up|down", 16)])
    state = tracker.init(PARAMS)
    assert jax.tree.leaves((state.reduction_basis, state.output_basis)) == []


def test_default_rule_leaves_small_matrices():
    """A matrix whose smaller side is no larger than the rank gains nothing."""
    params = {"small": jnp.zeros((8, 100)), "large": jnp.zeros((9, 100))}
    plan = make_plan(params, None, 8, "smaller")
    assert [leaf.path for leaf in plan.leaves if leaf.is_target] == ["large"]


def test_default_rule_that_projects_nothing_warns():
    with pytest.warns(UserWarning, match="no leaf is projected; .*: 'bias', 'down', 'up'. Lower"):
        plan = make_plan(PARAMS, None, 128, "smaller")
    assert plan.projections == ()


def test_square_leaves_have_one_side():
    params = {"w": jnp.zeros((16, 16))}
    for side in ("smaller", "larger"):
        assert make_plan(params, None, 4, side).leaves[0].sides == ("reduction",)


def test_empty_and_none():
    assert make_plan({}, None, 4, "smaller").leaves == ()
    plan = make_plan({"a": None, "up": jnp.zeros((16, 24))}, None, 4, "smaller")
    assert [leaf.path for leaf in plan.leaves] == ["a", "up"]
    assert [p.index for p in plan.projections] == [1]


def test_shape_dtype_structs_give_the_same_plan():
    abstract = jax.eval_shape(lambda: PARAMS)
    assert make_plan(abstract, None, 4, "smaller") == make_plan(PARAMS, None, 4, "smaller")


def test_two_leaves_of_one_name_are_an_error():
    params = {"a/b": jnp.zeros((16, 24)), "a": {"b": jnp.zeros((16, 24))}}
    with pytest.raises(ValueError, match="two leaves of params are both called 'a/b'; rename"):
        make_plan(params, None, 4, "smaller")


def test_check_count():
    plan = make_plan(PARAMS, None, 4, "smaller")
    plan.check_count([1, 2, 3], "updates")
    with pytest.raises(ValueError, match=r"^updates has 2 leaves, but .* params with 3; call init"):
        plan.check_count([1, 2], "updates")


# Equality ----------------------------------------------------------------------------------------


def variants():
    yield make_plan(PARAMS, None, 4, "smaller")
    yield make_plan(PARAMS, None, 5, "smaller")
    yield make_plan(PARAMS, None, 4, "larger")
    yield make_plan(PARAMS, [("up", 4)], 4, "smaller")
    yield make_plan({**PARAMS, "up": jnp.zeros((16, 25))}, None, 4, "smaller")
    yield make_plan({**PARAMS, "up": jnp.zeros((16, 24), jnp.bfloat16)}, None, 4, "smaller")


def test_equality():
    for i, (one, again) in enumerate(zip(variants(), variants(), strict=True)):
        assert one == again
        assert hash(one) == hash(again)
        for j, other in enumerate(variants()):
            assert (one == other) is (i == j)
    assert Plan() != "plan"


def test_the_empty_plan_equals_itself_alone():
    for plan in variants():
        assert plan != Plan()
    assert make_plan({}, None, 4, "smaller") == Plan()


def test_pickle_and_copy():
    for plan in variants():
        for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
            assert copied == plan
            assert copied.leaves == plan.leaves
            assert copied.projections == plan.projections
    # Hashes of strings differ between processes, so a pickle must not hold one.
    hash(plan)
    assert b"_hash" not in pickle.dumps(plan)


def test_a_plan_is_a_node_without_leaves():
    plan = make_plan(PARAMS, None, 4, "smaller")
    assert jax.tree.leaves(plan) == []
    assert jax.tree.map(lambda x: x, {"plan": plan})["plan"].leaves == plan.leaves
    assert jax.jit(lambda plan, x: (plan, x))(plan, 1.0)[0].leaves == plan.leaves


def test_jit_tells_two_plans_apart():
    """Two optimizers whose states have the same arrays, read in different ways."""
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)}
    read = jax.jit(lambda state, g: (state.plan.leaves[0].sides, state)[1])
    states = {
        side: lro.refresh_basis(4, targets=[("w", Target(4, *axes))]).init(params)
        for side, axes in {"plain": (0, 1), "transposed": (1, 0)}.items()
    }
    shapes = {side: [x.shape for x in jax.tree.leaves(state)] for side, state in states.items()}
    assert shapes["plain"] == shapes["transposed"]
    for side, state in states.items():
        assert read(state, params).plan.leaves == states[side].plan.leaves
    assert read._cache_size() == 2
    read(states["plain"], params)
    assert read._cache_size() == 2


@pytest.fixture(scope="module")
def stepped():
    """An optimizer's compiled update, its first state and one after a refresh."""
    tx = momentum()
    step, fresh = jax.jit(tx.update), tx.init(PARAMS)
    gradients = jax.tree.map(lambda x: x + 1, PARAMS)
    return step, gradients, fresh, step(gradients, fresh, PARAMS)[1]


def test_step_is_compiled_once(stepped):
    step, gradients, _, state = stepped
    for _ in range(3):
        _, state = step(gradients, state, PARAMS)
    assert step._cache_size() == 1


# Serialization -----------------------------------------------------------------------------------


def test_pickled_state(stepped):
    *_, state = stepped
    restored = pickle.loads(pickle.dumps(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_flax_serialization(stepped):
    step, gradients, fresh, state = stepped
    blob = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(fresh, blob)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    trackers = [
        node
        for node in jax.tree.leaves(restored, is_leaf=lambda x: isinstance(x, lro.TrackerState))
        if isinstance(node, lro.TrackerState)
    ]
    assert trackers[0].plan.leaves == make_plan(PARAMS, None, 4, "smaller").leaves
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    # And it goes on.
    restored = jax.tree.map(jnp.asarray, restored)
    expected, _ = step(gradients, state, PARAMS)
    updates, _ = step(gradients, restored, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
