"""Checkpoints: going on from one is bit for bit as if training had never stopped."""

import pickle
import re
import warnings

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from tests.helpers.data import normal, random_like
from tests.helpers.loops import relaxed

PARAMS = {
    "layer": {"kernel": normal(0, (8, 12)), "bias": normal(1, (12,))},
    "square": {"kernel": normal(2, (8, 8))},
    "stack": {"q": {"kernel": normal(3, (3, 8, 12))}, "norm": {"scale": jnp.ones((3, 8))}},
}
TX = optax.chain(
    optax.clip_by_global_norm(10.0),
    lro.galore_project(
        relaxed(optax.adamw(1e-2, weight_decay=0.1)),
        lro.refresh_basis(3, 4, stagger=True),
        metrics=True,
    ),
)
STOP, STEPS = 3, 7  # refreshes come after the stop, too


@jax.jit
def step(params, state, gradients):
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def go_on(params, state, steps):
    for number in steps:
        params, state = step(params, state, random_like(PARAMS, number))
    return params, state


@pytest.fixture(scope="module")
def run():
    """Params and state at the stop, and at the end of a run that did not stop."""
    start = go_on(PARAMS, TX.init(PARAMS), range(STOP))
    return start, go_on(*start, range(STOP, STEPS))


def assert_bit_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def assert_goes_on(restored, run):
    """A restored state is of the right types, and going on from it changes nothing."""
    (_, state), finished = run
    assert jax.tree.structure(restored[1]) == jax.tree.structure(state)
    assert restored[1][1].tracker_state.plan.leaves
    end = go_on(*restored, range(STOP, STEPS))
    assert_bit_identical(end, finished)
    refreshes = end[1][1].tracker_state.refreshes - state[1].tracker_state.refreshes
    assert (np.asarray(refreshes) > 0).all()


def test_state_is_made_of_non_empty_arrays(run):
    (_, state), _ = run
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert leaf.size > 0
        assert not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def abstract(tree):
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def test_orbax_standard_save_and_restore(run, tmp_path):
    start, _ = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", start)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract(start))
    assert_bit_identical(restored, start)
    assert_goes_on(restored, run)


def test_orbax_restore_into_a_fresh_process_needs_only_params_and_tx(run, tmp_path):
    """The target of a restore is made from shapes: nothing of the old state is there."""
    start, _ = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", start)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: PARAMS)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            ),
            (shapes, jax.eval_shape(TX.init, shapes)),
        )
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_goes_on(restored, run)


def test_orbax_checkpoint_manager(run, tmp_path):
    start, _ = run
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(STOP, args=ocp.args.StandardSave(start))
        manager.wait_until_finished()
        restored = manager.restore(STOP, args=ocp.args.StandardRestore(abstract(start)))
    assert_goes_on(restored, run)


def test_orbax_pytree_checkpointer(run, tmp_path):
    start, _ = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(tmp_path / "state", start)
        restored = checkpointer.restore(
            tmp_path / "state",
            item=start,
            restore_args=ocp.checkpoint_utils.construct_restore_args(start),
        )
    assert_goes_on(restored, run)


def test_flax_serialization(run):
    start, _ = run
    target = (PARAMS, TX.init(PARAMS))
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(start))
    assert_goes_on(jax.tree.map(jnp.asarray, restored), run)


def test_flax_state_dict_holds_arrays_only(run):
    (_, state), _ = run
    leaves = jax.tree.leaves(flax.serialization.to_state_dict(state))
    assert all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
    assert len(leaves) == len(jax.tree.leaves(state))


def test_pickle(run):
    start, _ = run
    assert_goes_on(pickle.loads(pickle.dumps(start)), run)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_restore_onto_another_mesh(run, tmp_path, kind):
    """Saved from rows on eight devices, restored as columns on four, with the same future."""
    _, finished = run

    def shard(tree, mesh, axis):
        def place(x):
            fits = x.ndim >= 2 and x.shape[axis] % mesh.size == 0
            spec = [None] * x.ndim
            if fits:
                spec[axis] = "x"
            return NamedSharding(mesh, P(*spec))

        return jax.tree.map(place, tree)

    before = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    with jax.set_mesh(before):
        params = jax.device_put(PARAMS, shard(PARAMS, before, 0))
        state = jax.jit(TX.init)(params)
        for number in range(STOP):
            gradients = jax.device_put(random_like(PARAMS, number), shard(PARAMS, before, 0))
            params, state = step(params, state, gradients)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", (params, state))
    after = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    with jax.set_mesh(after):
        whole = jax.eval_shape(lambda: (PARAMS, TX.init(PARAMS)))
        shardings = (
            shard(whole[0], after, -1),
            jax.tree.map(lambda x: NamedSharding(after, P()), whole[1]),
        )
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), whole, shardings
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", target)
        for one, two in zip(
            jax.tree.leaves(restored), jax.tree.leaves((params, state)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
        assert restored[0]["layer"]["kernel"].sharding.spec == P(None, "x")
        params, state = restored
        for number in range(STOP, STEPS):
            gradients = jax.device_put(random_like(PARAMS, number), shardings[0])
            params, state = step(params, state, gradients)
    # Other devices sum in another order.
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(finished[0]), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=1e-4)
    np.testing.assert_array_equal(
        state[1].tracker_state.refreshes, finished[1][1].tracker_state.refreshes
    )


def test_learned_bases_go_on_where_they_stopped(tmp_path):
    params = {"kernel": normal(0, (8, 12))}
    tx = lro.logra_sketch(relaxed(optax.adam(0.1)), lro.learn_basis(3, tied=False))
    update = jax.jit(tx.update)

    def steps(state, numbers):
        for number in numbers:
            _, state = update(random_like(params, number), state, params)
        return state

    state = steps(tx.init(params), range(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    assert_bit_identical(steps(restored, range(2, 4)), steps(state, range(2, 4)))


# What is asked of a checkpoint -> how its first differing leaf is named.
OTHERS = {
    "another rank": (
        lro.refresh_basis(4, 4, stagger=True),
        "reduction_basis/layer/kernel' has shape (8, 3) in the checkpoint and (8, 4) here",
    ),
    "fewer targets": (
        lro.refresh_basis(3, 4, targets=[("square|stack", 3), (".*", None)]),
        "reduction_basis/layer/kernel' has shape (8, 3) in the checkpoint and is not wanted here",
    ),
    "another side": (
        lro.refresh_basis(3, 4, side="output"),
        "output_basis/layer/kernel' has shape (12, 3) here and is not in the checkpoint",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_another_optimizer_names_the_leaf(case, run, tmp_path):
    tracker, message = OTHERS[case]
    other = optax.chain(
        optax.clip_by_global_norm(10.0),
        lro.galore_project(relaxed(optax.adamw(1e-2, weight_decay=0.1)), tracker, metrics=True),
    )
    start, _ = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", start)
        checkpointer.wait_until_finished()
        saved = checkpointer.metadata(tmp_path / "state").item_metadata.tree
    lro.check_restorable(saved, (PARAMS, jax.eval_shape(TX.init, PARAMS)))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        lro.check_restorable(saved, (PARAMS, jax.eval_shape(other.init, PARAMS)))
    assert "lro.migrate(opt_state, old_tx, new_tx, params)" in str(caught.value)


def test_a_state_of_another_rank_is_refused_by_update(run):
    """Where nothing looked at shapes before: flax.serialization restores any."""
    (params, state), _ = run
    other = optax.chain(
        optax.clip_by_global_norm(10.0),
        lro.galore_project(relaxed(optax.adamw(1e-2)), lro.refresh_basis(4, 4), metrics=True),
    )
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(other.init(PARAMS), data)
    with pytest.raises(ValueError, match=r"'layer/kernel': the state has a basis .* lro\.migrate"):
        other.update(params, restored, params)


def test_metadata_without_shapes_is_no_answer(run):
    (_, state), _ = run
    with pytest.raises(TypeError, match=r"saved holds nothing with a shape; give the metadata"):
        lro.check_restorable(None, state)
