"""Meshes of eight devices: the same training, whatever holds the weights."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from lowrank_optax._memory.hlo import collectives
from tests.helpers.assertions import avals
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

TYPES = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "auto": (AxisType.Auto, AxisType.Auto),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}

# Placement -> leaf -> spec. Rows are the input side of a layer, columns its output.
PLACEMENTS = {
    "replicated": {},
    "fsdp_rows": {"up": P("fsdp"), "down": P("fsdp"), "stack": P(None, "fsdp")},
    "tp_columns": {"up": P(None, "tp"), "down": P("tp", None), "stack": P(None, None, "tp")},
    "fsdp_tp": {
        "up": P("fsdp", "tp"),
        "down": P("tp", "fsdp"),
        "stack": P(None, "fsdp", "tp"),
        "experts": P("fsdp", None, "tp"),
        "bias": P("tp"),
    },
    "both_on_rows": {"up": P(("fsdp", "tp")), "stack": P(None, ("fsdp", "tp"))},
    "experts": {"experts": P("fsdp"), "up": P("tp")},
}
PARAMS = {
    "bias": (16,),
    "down": (16, 8),
    "experts": (4, 8, 6),
    "stack": (3, 8, 16),
    "up": (8, 16),
}
TARGETS = {
    "bias": None,
    "down": lro.Target(3),
    "experts": lro.Target(2, 1, 2),
    "stack": lro.Target(2, 1, 2, side="both"),
    "up": lro.Target(3),
}


def initial():
    return {name: 0.3 * normal(i, shape) for i, (name, shape) in enumerate(PARAMS.items())}


FINAL = {name: normal(50 + i, shape) for i, (name, shape) in enumerate(PARAMS.items())}


def loss_fn(params):
    """Quadratics with unequal curvature, so that gradients change their directions."""
    total = 0.0
    for name, final in FINAL.items():
        error = params[name] - final
        weight = jnp.linspace(0.2, 1.0, final.size).reshape(final.shape)
        total = total + jnp.sum(weight * error**2) / final.size
    return total


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=TYPES[kind])


def placed(params, placement, mesh):
    specs = PLACEMENTS[placement]
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in params.items()
    }


def optimizer(method="subspace"):
    # A large eps, lest the sign of an entry near zero decide a step of full size.
    return lro.galore_project(
        relaxed(optax.adamw(0.05, eps=1e-3, weight_decay=0.1)),
        lro.refresh_basis(every=3, targets=TARGETS, method=method),
        scale=0.5,
        metrics=True,
    )


def steps_of(tx, params, state, steps):
    """Losses, params and state of a scan, whose carry must keep its types, shardings included."""

    def step(carry, _):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, state), losses = jax.lax.scan(step, (params, state), length=steps)
    return losses, params, state


@functools.cache
def alone(method="subspace"):
    """The run without a mesh."""
    tx = optimizer(method)
    run = jax.jit(lambda p: steps_of(tx, p, tx.init(p), 7))
    return jax.tree.map(np.asarray, run(initial()))


def assert_same_training(result, method="subspace"):
    losses, params, state = result
    expected_losses, expected_params, expected_state = alone(method)
    assert expected_losses[-1] < 0.9 * expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected_params[name], atol=2e-3, err_msg=name)
    assert state.tracker_state.refreshes.tolist() == [3, 3, 3, 3]
    np.testing.assert_allclose(state.fidelity.energy, expected_state.fidelity.energy, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        *(("explicit", placement) for placement in PLACEMENTS if placement != "replicated"),
        *(("auto", placement) for placement in ("fsdp_rows", "fsdp_tp", "experts")),
        *(("mixed", placement) for placement in ("fsdp_tp", "both_on_rows")),
    ],
)
def test_training_is_the_same_on_a_mesh(kind, placement):
    mesh, tx = mesh_of(kind), optimizer()
    with jax.set_mesh(mesh):
        params = placed(initial(), placement, mesh)
        result = jax.jit(lambda p: steps_of(tx, p, tx.init(p), 7))(params)
        assert_same_training(jax.device_get(result))
        for name in PARAMS:
            assert result[1][name].sharding.is_equivalent_to(
                params[name].sharding, params[name].ndim
            )


@pytest.mark.parametrize("method", ["svd", "gram", "random"])
def test_other_methods_on_explicit_axes(method):
    mesh, tx = mesh_of("explicit"), optimizer(method)
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        result = jax.jit(lambda p: steps_of(tx, p, tx.init(p), 7))(params)
        assert_same_training(jax.device_get(result), method)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_bases_in_4_bits(kind):
    even = {k: t and lro.Target(2, t.reduction_axis, t.output_axis) for k, t in TARGETS.items()}
    tx = lro.galore_project(
        relaxed(optax.adamw(0.05, eps=1e-3)),
        lro.refresh_basis(every=3, targets=even, method="random", dtype=jnp.int4),
    )
    run = jax.jit(lambda p: steps_of(tx, p, tx.init(p), 7))
    expected_losses, _, expected = jax.device_get(run(initial()))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        losses, _, state = jax.device_get(run(params))
        shardings = lro.state_shardings(tx, params, jax.tree.map(lambda x: x.sharding, params))
        on_mesh = jax.jit(tx.init, out_shardings=shardings)(params)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    pairs = zip(state.tracker_state.encoders(), expected.tracker_state.encoders(), strict=True)
    for ours, others in pairs:
        # The same up to a number that lay between two codes.
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True):
            assert np.mean(np.abs(one - other) > 1e-5) < 0.05
    packed = on_mesh.tracker_state.reduction_basis["up"]
    assert (packed.shape, packed.dtype, packed.sharding.spec[0]) == (
        (8, 1),
        jnp.uint8,
        ("fsdp", "tp"),
    )


LIFTS = {
    "fira": lro.fira_lift(),
    "apollo": lro.apollo_lift(),
    "sketched": lro.sketched_residual_lift(2, 1.5),
}


def lifted(name):
    targets = {
        k: t and lro.Target(t.rank, t.reduction_axis, t.output_axis) for k, t in TARGETS.items()
    }
    return lro.galore_project(
        relaxed(optax.adamw(0.05, eps=1e-3, weight_decay=0.1)),
        lro.refresh_basis(every=3, targets=targets, method="random"),
        scale=0.5,
        lift=LIFTS[name],
    )


@functools.cache
def lifted_alone(name):
    tx = lifted(name)
    return jax.tree.map(np.asarray, jax.jit(lambda p: steps_of(tx, p, tx.init(p), 5))(initial()))


@pytest.mark.parametrize("name", LIFTS)
def test_lifts_on_explicit_axes(name):
    mesh, tx = mesh_of("explicit"), lifted(name)
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        losses, result, _ = jax.jit(lambda p: steps_of(tx, p, tx.init(p), 5))(params)
    expected_losses, expected, _ = lifted_alone(name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for path in PARAMS:
        np.testing.assert_allclose(result[path], expected[path], atol=2e-3, err_msg=path)


def spec(x):
    full = () if x.sharding is None else tuple(x.sharding.spec)
    return full + (None,) * (x.ndim - len(full))


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_state_is_placed_like_the_weights_on_explicit_axes(compiled):
    """A basis lies where its side does and a core where the other does; ranks are everywhere."""
    mesh, tx = mesh_of("explicit"), optimizer()
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        state = (jax.jit(tx.init) if compiled else tx.init)(params)
        tracker, mu = state.tracker_state, optax.tree.get(state, "mu")
        # The mesh axis of the array's own side comes first, then the one that would be idle.
        assert spec(tracker.reduction_basis["up"]) == (("fsdp", "tp"), None)
        assert spec(mu["up"]) == (None, ("tp", "fsdp"))
        assert spec(tracker.output_basis["down"]) == (("fsdp", "tp"), None)
        assert spec(mu["down"]) == (("tp", "fsdp"), None)
        assert spec(tracker.reduction_basis["stack"]) == (None, ("fsdp", "tp"), None)
        assert spec(tracker.output_basis["stack"]) == (None, ("tp", "fsdp"), None)
        assert spec(mu["stack"]) == (None, None, None)  # three layers: nothing divides
        assert spec(tracker.output_basis["experts"]) == ("fsdp", "tp", None)
        assert spec(mu["experts"]) == ("fsdp", "tp", None)
        assert spec(mu["bias"]) == ("tp",)
        shardings = jax.tree.leaves(lro.state_shardings(tx, params))
        for x, sharding in zip(jax.tree.leaves(state), shardings, strict=True):
            assert sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_types_of_the_state_never_change_on_explicit_axes(placement):
    mesh, tx = mesh_of("explicit"), optimizer()
    with jax.set_mesh(mesh):
        params = placed(initial(), placement, mesh)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
            assert spec(old) == spec(new)
        for name in PARAMS:
            assert updates[name].sharding == jax.typeof(params[name]).sharding


def test_a_replicated_state_works_with_sharded_weights():
    """Whoever calls init before placing the weights still trains."""
    mesh, tx = mesh_of("explicit"), optimizer()
    with jax.set_mesh(mesh):
        state = jax.device_put(tx.init(initial()), NamedSharding(mesh, P()))
        params = placed(initial(), "fsdp_tp", mesh)
        update = jax.jit(tx.update)
        for _ in range(2):
            gradients = jax.jit(jax.grad(loss_fn))(params)
            _, after = update(gradients, state, params)
            assert avals(after) == avals(state)
            state = after
        assert state.tracker_state.refreshes.tolist() == [1, 1, 1, 1]


def test_sharded_init_from_shapes_alone():
    mesh, tx = mesh_of("explicit"), optimizer()
    with jax.set_mesh(mesh):
        params = placed(initial(), "fsdp_tp", mesh)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        made, expected = jax.eval_shape(tx.init, shapes), jax.eval_shape(tx.init, params)
        for one, two in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
            assert (one.shape, spec(one)) == (two.shape, spec(two))


def moved(compiled):
    """Elements of the largest array of every collective, refreshes included."""
    return [math.prod(c.shape) for c in collectives(compiled.as_text(), refreshing=True)]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "specs",
    [(P("fsdp"), P("fsdp")), (P(None, "tp"), P("tp")), (P("fsdp", "tp"), P("tp", "fsdp"))],
    ids=["fsdp", "tp", "fsdp_tp"],
)
def test_no_matrix_is_moved(kind, specs):
    """optax.contrib.galore gathers the gradient and factorizes all of it on every device."""
    mesh, rank = mesh_of(kind), 4
    shapes = {"up": (64, 128), "down": (128, 64)}
    tx = lro.galore_project(optax.sgd(0.1, 0.9), lro.refresh_basis(rank, 2))
    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(normal(0, shape), NamedSharding(mesh, s))
            for (name, shape), s in zip(shapes.items(), specs, strict=True)
        }
        shardings = lro.state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        assert state.tracker_state.plan.projections
        update = jax.jit(tx.update, out_shardings=(named(params), shardings))
        compiled = update.lower(params, state, params).compile()
    # Thin arrays, of one side by the rank, may be moved; nothing as large as a matrix.
    sizes = moved(compiled)
    assert sizes
    assert max(sizes) <= 128 * 2 * rank


def named(params):
    return jax.tree.map(lambda x: x.sharding, params)


def test_the_search_for_collectives_finds_them():
    mesh = mesh_of("auto")
    x = jax.device_put(normal(0, (64, 128)), NamedSharding(mesh, P("fsdp")))
    gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
    assert 64 * 128 in moved(gather.lower(x).compile())
