"""What other low-rank optimizers get wrong, each a test named after where it was seen."""

import pickle

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowrank_optax as lro
from lowrank_optax._arrays.tree import flatten_with_paths
from tests.helpers.assertions import assert_orthonormal, avals, basis_matrices, energy, unchecked
from tests.helpers.data import at, normal, random_like, sequence
from tests.helpers.flax_names import as_pure
from tests.helpers.loops import relaxed, track, train

pytestmark = pytest.mark.newest

PARAMS = {"bias": normal(1, (4,)), "tall": normal(0, (10, 6)), "w": normal(2, (6, 10))}


def adamw(**options):
    return relaxed(
        lro.galore_adamw(**({"learning_rate": 0.1, "rank": 2, "refresh_every": 3} | options))
    )


def steps(tx, params, gradients):
    """All updates and the states, the first included, one compiled step at a time."""
    state, update = tx.init(params), jax.jit(tx.update)
    result, states = [], [state]
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        result.append(updates)
        states.append(state)
    return result, states


# optax.contrib.galore


def test_optax_contrib_galore_empty_placeholders():
    """Orbax refuses arrays of size zero."""
    state = adamw().init(PARAMS)
    assert all(x.size for x in jax.tree.leaves(state))
    assert isinstance(state.tracker_state.reduction_basis["bias"], optax.MaskedNode)


def test_optax_contrib_galore_none_leaves():
    params = PARAMS | {"static": None}
    (updates,), _ = steps(adamw(), params, [random_like(params, 0)])
    assert updates["static"] is None
    assert np.asarray(updates["w"]).any()


def test_optax_contrib_galore_mixed_dtypes():
    gradients = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    (updates,), (before, after) = steps(adamw(), PARAMS, [gradients])
    assert updates["w"].dtype == jnp.float32
    assert avals(before) == avals(after)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_optax_contrib_galore_nan_poisons_the_basis(bad):
    """One bad gradient at a refresh left the basis NaN for an interval, the moments for good."""
    gradients = [random_like(PARAMS, step) for step in range(7)]
    gradients[3]["w"] = gradients[3]["w"].at[0, 0].set(bad)
    tx = relaxed(optax.apply_if_finite(adamw(), 5))
    updates, states = steps(tx, PARAMS, gradients)
    for state in states:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert not np.asarray(updates[3]["w"]).any()
    assert np.asarray(updates[4]["w"]).any()


def test_optax_contrib_galore_zero_gradient_keeps_basis():
    """A zero gradient at a refresh set the basis to unit vectors."""
    gradients = [random_like(PARAMS, step) for step in range(5)]
    gradients[3] = jax.tree.map(jnp.zeros_like, PARAMS)
    _, states = steps(lro.refresh_basis(2, 3), PARAMS, gradients)
    np.testing.assert_array_equal(states[3].reduction_basis["w"], states[4].reduction_basis["w"])
    assert states[5].refreshes.tolist() == [2, 2]


def test_optax_contrib_galore_scanned_stacks_and_stacked_norms():
    """A stack of layers was an error, and a stack of norm scales was projected."""
    params = {
        "layers": {
            "mlp": {
                "up": {"kernel": jnp.ones((3, 8, 16))},
                "down": {"kernel": jnp.ones((3, 16, 8))},
            },
            "norm": {"scale": jnp.ones((3, 8))},
        },
        "embed": {"embedding": jnp.ones((50, 8))},
    }
    state = lro.refresh_basis(2).init(params)
    projected = [projection.path for projection in state.plan.projections]
    assert projected == ["layers/mlp/down/kernel", "layers/mlp/up/kernel"]
    assert state.reduction_basis["layers"]["mlp"]["up"]["kernel"].shape == (3, 8, 2)


def test_optax_contrib_galore_params_and_extra_args_reach_the_inner_optimizer():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args, params=params)
        return jax.tree.map(lambda u, p: u + p, updates, params), state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = lro.galore_project(inner, lro.refresh_basis(2))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=3.0)
    assert seen["value"] == 3.0
    assert seen["params"]["w"].shape == (2, 10)


def test_optax_contrib_galore_one_rank_for_all():
    tracker = lro.refresh_basis(targets=[("tall", 3), ("w", 0.5)], rank=2)
    state = tracker.init(PARAMS)
    assert state.output_basis["tall"].shape == (6, 3)
    assert state.reduction_basis["w"].shape == (6, 3)
    both = lro.refresh_basis(targets=[("tall", 1), ("w", 4)]).init(PARAMS)
    assert both.output_basis["tall"].shape == (6, 1)
    assert both.reduction_basis["w"].shape == (6, 4)


def test_optax_contrib_galore_full_factorizations_by_default():
    jaxpr = str(jax.make_jaxpr(adamw().update)(PARAMS, adamw().init(PARAMS), PARAMS))
    for name in ("svd", "eigh", "qr", "householder"):
        assert f" {name}[" not in jaxpr
    # The only factorizations are of rank-by-rank matrices.
    assert "cholesky" in jaxpr


def test_optax_contrib_galore_projects_the_larger_side():
    state = adamw().init(PARAMS)
    mu = optax.tree.get(state, "mu")
    # The basis on the side of 6, the core on the side of 10.
    assert state.tracker_state.reduction_basis["w"].shape == (6, 2)
    assert mu["w"].shape == (2, 10)
    assert mu["tall"].shape == (10, 2)


# GaLore, Q-GaLore, APOLLO, Fira and their integrations


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_galore_26_nan_at_step_zero(dtype):
    """Half precision and a first gradient of almost no rank: the SVD failed."""
    params = {"w": jnp.zeros((12, 16), dtype)}
    column = jnp.zeros((12, 16), dtype).at[3].set(1e-4)
    (updates,), (_, state) = steps(adamw(rank=4), params, [{"w": column}])
    assert np.isfinite(np.asarray(updates["w"], np.float32)).all()
    p, _ = basis_matrices(state.tracker_state)
    assert_orthonormal(p)


@pytest.mark.parametrize("method", ["subspace", "svd", "gram"])
def test_galore_58_ill_conditioned_gradients(method):
    left, right = (np.linalg.qr(np.asarray(normal(i, (16, 16))))[0] for i in (0, 1))
    gradient = left @ np.diag(10.0 ** -np.arange(16)) @ right
    params = {"w": jnp.zeros((16, 16))}
    tracker = lro.refresh_basis(8, method=method)
    _, state = jax.jit(tracker.update)(
        {"w": jnp.asarray(gradient, jnp.float32)}, tracker.init(params)
    )
    p, _ = basis_matrices(state)
    assert_orthonormal(p)
    assert energy(gradient[None], p, None) > 1 - 1e-6


def test_galore_35_resume_loses_the_projector():
    """Also ms-swift: the projector was a Python object."""
    gradients = [random_like(PARAMS, step) for step in range(5)]
    tx = adamw()
    _, states = steps(tx, PARAMS, gradients[:2])
    restored = pickle.loads(pickle.dumps(jax.device_get(states[-1])))
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(restored))
    update = jax.jit(tx.update)
    state = states[-1]
    for gradient in gradients[2:]:
        left, state = update(gradient, state, PARAMS)
        right, restored = update(gradient, restored, PARAMS)
        np.testing.assert_array_equal(left["w"], right["w"])


def test_unsloth_zero_modules_matched():
    with pytest.raises(ValueError, match="targets matches no matrix among the 3 leaves"):
        adamw(targets=[("attn", 8)]).init(PARAMS)
    with pytest.warns(UserWarning, match="no leaf is projected"):
        adamw(rank=64).init(PARAMS)


def test_galore_2_sharded_arrays_keep_the_saving():
    """DDP, ZeRO and FSDP flatten gradients; a sharded array stays a matrix."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
        params = {"w": jax.device_put(PARAMS["w"], sharding)}
        state = jax.jit(adamw().init)(params)
        mu = optax.tree.get(state, "mu")["w"]
        assert mu.shape == (2, 10)
        assert mu.addressable_shards[0].data.shape == (2, 5)


def test_galore_78_micro_batches_advance_the_clock_once():
    """Also LLaMA-Factory#5887, APOLLO#14, GaLore#62."""
    schedule = lambda count: 0.1 * (count + 1)  # noqa: E731
    tx = relaxed(optax.MultiSteps(adamw(learning_rate=schedule), 2).gradient_transformation())
    gradients = [random_like(PARAMS, step) for step in range(6)]
    _, states = steps(tx, PARAMS, gradients)
    clocks = [int(x) for _, x in optax.tree.get_all_with_path(states[-1], "count")]
    assert clocks
    assert set(clocks) == {3}
    assert int(optax.tree.get(states[-1], "tracker_count")) == 3


def test_unsloth_bias_correction_runs_one_two_three():
    _, states = steps(adamw(), PARAMS, [random_like(PARAMS, step) for step in range(3)])
    for number, state in enumerate(states):
        counts = [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]
        assert set(counts) == {number}
        assert int(state.tracker_state.tracker_count) == number


def test_galore_decay_equals_that_of_adamw():
    """Decay came after the update, with another factor than AdamW's."""
    tx = adamw(targets=[("w", 1.0), ("tall", 1.0)], scale=1.0, weight_decay=0.3)
    plain = relaxed(optax.adamw(0.1, weight_decay=0.3))
    gradients = [random_like(PARAMS, step) for step in range(3)]
    left, right = steps(tx, PARAMS, gradients)[0], steps(plain, PARAMS, gradients)[0]
    for one, two in zip(left, right, strict=True):
        for path in PARAMS:
            np.testing.assert_array_equal(one[path], two[path])


def test_q_galore_12_embeddings_and_norms_move():
    params = {
        "embed": {"embedding": normal(0, (50, 8))},
        "norm": {"scale": jnp.ones(8)},
        "mlp": {"kernel": normal(1, (8, 16)), "bias": jnp.zeros(16)},
        "lm_head": {"kernel": normal(2, (8, 50))},
    }
    (updates,), (_, state) = steps(adamw(), params, [random_like(params, 0)])
    assert state.tracker_state.refreshes.tolist() == [1]
    for leaf in jax.tree.leaves(updates):
        assert (np.abs(np.asarray(leaf)) > 1e-4).mean() > 0.9


def test_galore_43_bfloat16_training_is_stable():
    """Bases, cores and moments are float32 whatever the weights are."""
    weights = {"w": normal(0, (12, 16), jnp.bfloat16)}
    final = normal(1, (12, 16))

    def loss(params):
        return jnp.mean((params["w"].astype(jnp.float32) - final) ** 2)

    losses, _, state = train(adamw(rank=6, scale=1.0), weights, jax.value_and_grad(loss), 60)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.3 * losses[0]
    assert state.tracker_state.refreshes.tolist() == [20]
    arrays = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(x.dtype == jnp.float32 for x in arrays)


def test_apollo_12_no_saving():
    """The report is byte for byte what the state holds, and what it holds is small."""
    params = {"w": jnp.zeros((64, 256)), "bias": jnp.zeros(256)}
    tx = lro.galore_adamw(0.1, 8)
    state = tx.init(params)
    report = lro.describe(tx, params)
    assert report.state_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
    assert report.adamw_bytes == sum(
        x.nbytes for x in jax.tree.leaves(optax.adamw(1.0).init(params))
    )
    assert report.state_bytes < 0.2 * report.adamw_bytes


def test_galore_14_one_refresh_of_all_layers():
    params = {f"layer_{i}": jnp.zeros((6, 10)) for i in range(4)}
    states = track(
        lro.refresh_basis(2, 8, stagger=True, method="random"), params, sequence(params, 17)
    )
    assert np.diff(states.refreshes, axis=0)[1:].sum(axis=1).max() == 1


def test_llama_factory_6487_beside_lora():
    """Adapters and projected weights live in one optimizer, by optax.partition."""
    params = {"base": {"kernel": normal(0, (6, 10))}, "lora": {"a": normal(1, (6, 2))}}
    tx = optax.partition(
        {"full": adamw(targets=[("base/kernel", 2)]), "lora": relaxed(optax.adamw(1e-2))},
        {"base": "full", "lora": "lora"},
    )
    (updates,), (_, state) = steps(tx, params, [random_like(params, 0)])
    assert all(np.asarray(x).any() for x in jax.tree.leaves(updates))
    assert optax.tree.get(state, "refreshes").tolist() == [1]


# Peers


def test_flora_momentum_transfer_at_refresh():
    """Flora's decoded momentum is noise after a refresh; ours is the momentum's projection."""
    params = {"w": jnp.zeros((12, 16))}
    gradients = [{"w": normal(i, (12, 16))} for i in range(4)]
    tx = lro.galore_project(optax.trace(0.9), lro.refresh_basis(6, 3, method="random"))
    _, states = steps(tx, params, gradients)

    def decoded(state):
        p, _ = basis_matrices(state.tracker_state)
        return p[0] @ np.asarray(state.inner_state.trace["w"], np.float64), p[0]

    (before, _), (after, p) = decoded(states[3]), decoded(states[4])
    # Take out the new gradient's share: what remains is the old momentum, seen from the new basis.
    carried = after - p @ (p.T @ np.asarray(gradients[3]["w"], np.float64))
    np.testing.assert_allclose(carried, 0.9 * p @ (p.T @ before), atol=1e-5)
    cosine = np.sum(carried * before) / np.linalg.norm(carried) / np.linalg.norm(before)
    assert cosine > 0.4


@pytest.mark.parametrize("shape", [(4, 40), (40, 4)])
@pytest.mark.parametrize("side", ["smaller", "larger", "reduction", "output", "both"])
def test_reverse_std_rank_beyond_the_smaller_side(shape, side):
    params = {"w": normal(0, shape)}
    tx = adamw(targets=[("w", lro.Target(9, side=side))])
    (updates,), (state, _) = steps(tx, params, [params])
    assert updates["w"].shape == shape
    # The whole space: trained full-rank, with no basis.
    assert jax.tree.leaves(state.tracker_state.reduction_basis) == []


def test_lda_adam_error_feedback_lives_in_the_gradient():
    """All state is in the state: an update changes no gradient, and a repeat repeats."""
    tx = adamw()
    gradients, state = random_like(PARAMS, 0), tx.init(PARAMS)
    before = jax.tree.map(np.array, gradients)
    first, _ = jax.jit(tx.update)(gradients, state, PARAMS)
    again, _ = jax.jit(tx.update)(gradients, state, PARAMS)
    for path in PARAMS:
        np.testing.assert_array_equal(gradients[path], before[path])
        np.testing.assert_array_equal(first[path], again[path])


# JAX


def conds(jaxpr, inside=0):
    """The conditionals of a jaxpr at any depth, each with the number of vmapped selects."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            found.append(eqn)
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    found += conds(sub)
    return found


def test_jax_cond_under_vmap_becomes_select():
    """A stack refreshes under one scalar predicate, so that nothing runs between refreshes."""
    params = {"stack": jnp.zeros((5, 6, 10))}
    tracker = lro.refresh_basis(targets=[("stack", lro.Target(2, 1, 2))])
    jaxpr = jax.make_jaxpr(tracker.update)(params, tracker.init(params)).jaxpr
    outer = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(outer) == 1
    assert all(eqn.invars[0].aval.shape == () for eqn in conds(jaxpr))
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert "cholesky" not in outside
    assert "dot_general" not in outside


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.proj = nnx.Linear(8, 16, use_bias=False, rngs=rngs)


def test_nnx_optimizer_variable_paths():
    """init sees Variables, whose paths end in .value, and update sees arrays."""
    model = Layer(nnx.Rngs(0))
    variables = nnx.state(model, nnx.Param)
    arrays = as_pure(variables)
    names = [flatten_with_paths(tree)[0] for tree in (variables, arrays)]
    assert names == [["proj/kernel"], ["proj/kernel"]]
    tx = adamw(targets=[("^proj/kernel$", 2)])
    state = tx.init(variables)
    assert [leaf.path for leaf in state.tracker_state.plan.leaves] == ["proj/kernel"]
    made = tx.init(arrays)
    updates, _ = jax.jit(tx.update)(arrays, made, arrays)
    assert np.asarray(jax.tree.leaves(updates)[0]).any()


def test_flax_boxes_keep_their_own_shapes():
    model = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.normal(), ("x", "y")))
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    (updates,), (_, state) = steps(adamw(), params, [params])
    assert updates["kernel"].value.shape == (8, 16)
    assert nn.unbox(optax.tree.get(state, "mu")["kernel"]).shape == (2, 16)


def test_equinox_modules_are_trees_like_any_other():
    model = eqx.nn.Linear(8, 16, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    (updates,), (_, state) = steps(adamw(), params, [params])
    assert state.tracker_state.refreshes.tolist() == [1]
    assert np.asarray(updates.weight).any()


def test_inject_hyperparams_makes_tracers_of_ints():
    with pytest.raises(TypeError, match=r"static_args=\('rank',\)"):
        unchecked(lro.refresh_basis)(rank=jnp.asarray(4))
    with pytest.raises(TypeError, match=r"static_args=\('every',\)"):
        unchecked(lro.refresh_basis)(every=jnp.asarray(4))


def test_compile_time_grows_with_the_number_of_leaves():
    def size(layers):
        params = {f"layer_{i:02}": jnp.zeros((6, 10)) for i in range(layers)}
        tracker = lro.refresh_basis(2)
        jaxpr = str(jax.make_jaxpr(tracker.update)(params, tracker.init(params)))
        return jaxpr.count("dot_general")

    assert size(12) == size(2) > 0


def test_state_is_parallel_to_params():
    """tree_map_params asks that of a state."""
    tx = adamw()
    marks = optax.tree.map_params(
        tx,
        lambda x, path: path,
        tx.init(PARAMS),
        {path: path for path in PARAMS},
        transform_non_params=lambda x: None,
        # As for any state with masked leaves.
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert optax.tree.get(marks, "mu") == {path: path for path in PARAMS}
    assert marks.tracker_state.reduction_basis["w"] == "w"
    assert marks.tracker_state.output_basis["tall"] == "tall"


def test_a_refresh_that_fails_is_not_counted():
    gradients = sequence(PARAMS, 3)
    gradients["w"] = gradients["w"].at[0].set(jnp.nan)
    states = track(lro.refresh_basis(2, 3), PARAMS, gradients)
    assert at(states, 1).refreshes.tolist() == [1, 0]
    assert at(states, 3).refreshes.tolist() == [1, 1]
