"""``state_shardings`` through wrappers and frameworks, and the metadata that Flax reads."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from lowrank_optax._arrays import tree
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

RANK = 4
SHAPES = {"bias": (6,), "down": (32, 16), "stack": (3, 16, 32), "tall": (20, 12), "up": (16, 32)}
SPECS = {
    "bias": P("fsdp"),  # 6 is not divided by 4
    "down": P("tp", "fsdp"),
    "stack": P(None, "fsdp", "tp"),
    "tall": P("fsdp", "tp"),
    "up": P("fsdp", "tp"),
}
TARGETS = [("down|up|tall", RANK), ("stack", lro.Target(RANK, 1, 2)), (".*", None)]
# What belongs to each target: its basis, and its core.
BASES = {
    "down": P(("fsdp", "tp"), None),
    "stack": P(None, ("fsdp", "tp"), None),
    "tall": P("tp", None),  # 12 is not divided by 8
    "up": P(("fsdp", "tp"), None),
}
CORES = {
    "bias": P(None),
    "down": P(("tp", "fsdp"), None),
    "stack": P(None, None, ("tp", "fsdp")),
    "tall": P("fsdp", None),  # 20 is not divided by 8
    "up": P(None, ("tp", "fsdp")),
}


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind,) * 2)


def shapes():
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def named(mesh):
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def galore(learning_rate=1e-2):
    return lro.galore_adamw(learning_rate, RANK, targets=TARGETS, metrics=True)


def matrices():
    return lro.galore_adamw(1e-2, RANK, targets=TARGETS[:-1])


WRAPPERS = {
    "alone": galore,
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), galore()),
    "MultiSteps": lambda: optax.MultiSteps(galore(), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(galore)(1e-2),
    "masked": lambda: optax.masked(galore(), dict.fromkeys(SHAPES, True)),
    "partition": lambda: optax.partition(
        {"low": matrices(), "full": optax.adam(1e-3)},
        {name: "full" if name == "bias" else "low" for name in SHAPES},
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(galore(), 3),
    "inside MultiSteps": lambda: lro.galore_project(
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        lro.refresh_basis(targets=TARGETS),
    ),
}


def entries(state, field):
    """The leaves of every tree in a state that is a field of this name, by parameter."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts = tree.path_name(path).split("/")
        if field in parts and parts[-1] in SHAPES:
            found[parts[-1]] = leaf
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_through_wrappers(wrapper):
    tx, mesh = WRAPPERS[wrapper](), mesh_of()
    shardings = lro.state_shardings(tx, shapes(), named(mesh))
    state = jax.eval_shape(tx.init, shapes())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    for moment in ("mu", "nu"):
        specs = {name: s.spec for name, s in entries(shardings, moment).items()}
        assert specs == CORES
    found = entries(shardings, "reduction_basis") | entries(shardings, "output_basis")
    assert {name: s.spec for name, s in found.items()} == BASES
    if wrapper == "MultiSteps":
        sums = {name: s.spec for name, s in entries(shardings, "acc_grads").items()}
        assert sums == SPECS | {"bias": P(None)}
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.ndim > 1 or sharding.is_fully_replicated
        sharding.shard_shape(leaf.shape)  # raises where an axis does not divide


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_step_keeps_the_shardings(kind):
    """Jitted init and step with the shardings; the updates are those of one device."""
    mesh, tx = mesh_of(kind), relaxed(optax.chain(optax.clip_by_global_norm(9.0), galore()))
    params = {name: normal(i, shape) for i, (name, shape) in enumerate(SHAPES.items())}
    specs = SPECS | {"bias": P()}
    gradients = jax.tree.map(lambda x: x * x, params)
    update = jax.jit(tx.update)
    expected, expected_state = update(gradients, jax.jit(tx.init)(params), params)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in params.items()}
        shardings = lro.state_shardings(tx, placed)
        state = jax.jit(tx.init, out_shardings=shardings)(placed)
        step = jax.jit(
            tx.update, out_shardings=(jax.tree.map(lambda x: x.sharding, placed), shardings)
        )
        updates, state = step(jax.tree.map(lambda x: x * x, placed), state, placed)
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], expected[name], atol=1e-5, err_msg=name)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        assert got.shape == wanted.shape
    for got, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert got.sharding.is_equivalent_to(sharding, got.ndim)


@pytest.mark.parametrize(
    "spec", [P("fsdp"), P(None, "fsdp"), P(("fsdp", "tp"))], ids=["rows", "columns", "both axes"]
)
def test_a_device_holds_its_share(spec):
    """Within 5 % of the whole state over the devices, whichever side of a weight is sharded."""
    mesh = mesh_of()
    sizes = {"q": (64, 64), "up": (64, 256), "down": (256, 64)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in sizes.items()}
    tx = lro.galore_adamw(1e-2, 16)
    state = jax.eval_shape(tx.init, params)
    shardings = lro.state_shardings(tx, params, NamedSharding(mesh, spec))
    total = here = 0
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        total += x.size * x.dtype.itemsize
        here += np.prod(s.shard_shape(x.shape), dtype=int) * x.dtype.itemsize
    devices = 8 if spec == P(("fsdp", "tp")) else 4
    assert here <= 1.05 * total / devices


def test_specs_stay_specs():
    tx = galore()
    with jax.set_mesh(mesh_of()):
        specs = lro.state_shardings(tx, shapes(), SPECS)
        assert specs.inner_state[0].mu["up"] == CORES["up"]
        assert specs.inner_state[0].mu["bias"] == P(None)
        state = jax.jit(
            lambda: tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape), shapes())),
            out_shardings=specs,
        )()
        assert state.inner_state[0].mu["up"].sharding.spec == CORES["up"]


def test_shardings_of_the_leaves_themselves():
    mesh, tx = mesh_of(), galore()
    params = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in shapes().items()
    }
    given = lro.state_shardings(tx, shapes(), named(mesh))
    assert jax.tree.leaves(lro.state_shardings(tx, params)) == jax.tree.leaves(given)


def test_one_device_and_no_device():
    tx, params = galore(), {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    for sharding in jax.tree.leaves(lro.state_shardings(tx, params)):
        assert isinstance(sharding, SingleDeviceSharding)
    for spec in jax.tree.leaves(lro.state_shardings(tx, shapes())):
        assert all(entry is None for entry in spec)


def test_a_single_array_and_none_leaves():
    mesh, tx = mesh_of(), lro.galore_adamw(1e-2, RANK)
    shardings = lro.state_shardings(
        tx, jax.ShapeDtypeStruct((16, 32), jnp.float32), NamedSharding(mesh, P("fsdp", "tp"))
    )
    assert shardings.inner_state[0].mu.spec == CORES["up"]
    assert shardings.tracker_state.reduction_basis.spec == BASES["up"]
    params = {"none": None, "up": shapes()["up"]}
    shardings = lro.state_shardings(tx, params, {"none": None, "up": named(mesh)["up"]})
    assert shardings.inner_state[0].mu["up"].spec == CORES["up"]


def test_memory_kinds_follow_the_parameter():
    mesh = mesh_of()
    host = NamedSharding(mesh, P("fsdp", "tp"), memory_kind="unpinned_host")
    shardings = lro.state_shardings(lro.galore_adamw(1e-2, RANK), {"up": shapes()["up"]}, host)
    assert shardings.inner_state[0].mu["up"].memory_kind == "unpinned_host"


ERRORS = {
    "another leaf": (lambda m: named(m) | {"more": NamedSharding(m, P())}, "'more': params have"),
    "a missing leaf": (lambda m: {"up": named(m)["up"]}, "'bias': it has no sharding"),
    "too many axes": (lambda m: named(m) | {"bias": NamedSharding(m, P(None, "tp"))}, "'bias'"),
    "two meshes": (
        lambda m: named(m) | {"up": NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))},
        "2 different meshes",
    ),
    "no mesh in use": (lambda m: SPECS, r"'fsdp', and the mesh in use has none"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_leaf(case):
    make, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        lro.state_shardings(galore(), shapes(), make(mesh_of()))


def test_what_is_no_sharding():
    with pytest.raises(TypeError, match="'up': expected a NamedSharding, a PartitionSpec or None"):
        lro.state_shardings(galore(), shapes(), named(mesh_of()) | {"up": "fsdp"})


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = functools.partial(nnx.with_partitioning, nnx.initializers.lecun_normal())
        self.up = nnx.Linear(16, 32, kernel_init=init(("fsdp", "tp")), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=init(("tp", "fsdp")), rngs=rngs)

    def __call__(self, x, hidden=None, out=None):
        # On Explicit axes a product says where it is; elsewhere these are None.
        return x + self.down(nnx.relu(self.up(x, out_sharding=hidden)), out_sharding=out)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_nnx_optimizer_under_a_mesh(kind):
    """Flax places the state by its own metadata, which would be the parameter's."""

    def train(places=(), steps=3):
        model = Layer(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, lro.galore_adamw(1e-2, RANK, 2), wrt=nnx.Param)
        x = normal(5, (8, 16))

        @nnx.jit
        def step(model, optimizer):
            loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x, *places) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        return [float(step(model, optimizer)) for _ in range(steps)], optimizer

    explicit = kind == AxisType.Explicit
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = _without_sharding(train)
        with jax.set_mesh(mesh_of(kind)):
            losses, optimizer = train([P(None, "tp"), P(None, None)] if explicit else ())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    state = optimizer.opt_state
    basis, mu = state.tracker_state.reduction_basis.up.kernel, state.inner_state[0].mu
    # Flax's own placement leaves no axis over on Auto axes; on Explicit ones the type has them all.
    side, other = (("fsdp", "tp"), ("tp", "fsdp")) if explicit else ("fsdp", "tp")
    assert basis.out_sharding == (side, None)
    assert basis.get_value().sharding.spec[0] == side
    assert mu.up.kernel.out_sharding == (None, other)
    assert mu.up.kernel.get_value().sharding.spec == P(None, other)
    assert mu.down.kernel.out_sharding == (other, None)


def _without_sharding(train):
    with nnx.use_eager_sharding(False):
        return train()


def boxed(box):
    names = {"down": ("mlp", "embed"), "up": ("embed", "mlp")}
    rules = (("embed", "fsdp"), ("mlp", "tp"))
    logical = box is nn.LogicallyPartitioned
    place = dict(rules)
    return {
        name: {
            "kernel": box(
                normal(i, SHAPES[name]), axes if logical else tuple(place[a] for a in axes)
            )
        }
        for i, (name, axes) in enumerate(names.items())
    }, rules


@pytest.mark.parametrize("box", [nn.Partitioned, nn.LogicallyPartitioned])
def test_linen_boxes(box):
    params, rules = boxed(box)
    tx, mesh = lro.galore_adamw(1e-2, RANK), mesh_of()
    state = jax.eval_shape(tx.init, params)
    specs = nn.get_partition_spec(state)
    if box is nn.LogicallyPartitioned:
        specs = nn.logical_to_mesh(specs, rules)
    assert specs.tracker_state.reduction_basis["up"]["kernel"] == P("fsdp", None)
    assert specs.tracker_state.output_basis["down"]["kernel"] == P("fsdp", None)
    assert specs.inner_state[0].mu["up"]["kernel"] == P(None, "tp")
    assert specs.inner_state[0].nu["down"]["kernel"] == P("tp", None)
    # The boxes survive updates, and the updates are those of bare arrays.
    update = jax.jit(tx.update)
    with jax.numpy_dtype_promotion("standard"):
        updates, after = update(params, tx.init(params), params)
        bare = nn.unbox(params)
        expected, _ = update(bare, tx.init(bare), bare)
    assert jax.tree.structure(after) == jax.tree.structure(tx.init(params))
    assert updates["up"]["kernel"].names == params["up"]["kernel"].names
    for name in params:
        np.testing.assert_array_equal(nn.unbox(updates)[name]["kernel"], expected[name]["kernel"])
    placed = nn.get_partition_spec(params)
    if box is nn.LogicallyPartitioned:
        placed = nn.logical_to_mesh(placed, rules)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), placed)
    shardings = lro.state_shardings(tx, params, placed)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    mu = jax.jit(tx.init, out_shardings=shardings)(params).inner_state[0].mu
    assert nn.unbox(mu)["up"]["kernel"].sharding.spec == CORES["up"]
