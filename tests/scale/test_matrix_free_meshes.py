"""The matrix-free backward pass on meshes: the same training, and thin all-reduces."""

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
from lowrank_optax._arrays.mesh import shard_alike
from lowrank_optax._memory.hlo import bytes_by_kind, collectives
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

RANK, LAYERS, WIDTH, HIDDEN = 4, 3, 16, 32
PARAMS = {
    "layers": {
        "down": 0.2 * normal(0, (LAYERS, HIDDEN, WIDTH)),
        "up": 0.2 * normal(1, (LAYERS, WIDTH, HIDDEN)),
    },
    "head": normal(2, (WIDTH, 8)),
}
BATCH = normal(3, (8, 4, WIDTH))
TX = lro.galore_project(
    relaxed(optax.adamw(1e-2, weight_decay=0.1)),
    lro.refresh_basis(every=2, targets=[("up|down", RANK), ("head", None)]),
)
# Its random directions, and the products with them, come out of the same backward pass.
SKETCHED = lro.galore_project(
    relaxed(optax.adamw(1e-2, weight_decay=0.1, eps=1e-3)),
    lro.refresh_basis(every=2, targets=[("up|down", RANK), ("head", None)]),
    lift=lro.sketched_residual_lift(3),
)
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
KINDS = {
    "explicit": (EXPLICIT, EXPLICIT),
    "auto": (AUTO, AUTO),
    "explicit and auto": (EXPLICIT, AUTO),
    "auto and explicit": (AUTO, EXPLICIT),
}
# Specs of up, down and the batch.
PLACEMENTS = {
    "data": (P(), P(), P(("fsdp", "tp"))),
    "fsdp": (P(None, "fsdp"), P(None, "fsdp"), P("fsdp")),
    "tp": (P(None, None, "tp"), P(None, "tp"), P("fsdp")),
    "fsdp_tp": (P(None, "fsdp", "tp"), P(None, "tp", "fsdp"), P("fsdp")),
}


def loss_of(placement=None, explicit=()):
    """A scanned two-layer loss; on Explicit axes it says where its products are, as it must."""

    def kept(*names):
        return P(*(name if name in explicit else None for name in names))

    def product(x, w, weight, out):
        if not explicit or placement == "data":
            return x @ w
        # FSDP gathers a layer's weights; TP leaves them where they are.
        return jnp.matmul(x, jax.sharding.reshard(w, kept(*weight)), out_sharding=kept(*out))

    def loss(params, x):
        tp = "tp" if placement in ("tp", "fsdp_tp") else None

        def layer(x, w):
            hidden = jnp.tanh(product(x, w["up"], (None, tp), ("fsdp", None, tp)))
            return x + product(hidden, w["down"], (tp, None), ("fsdp", None, None)), None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    return loss


def steps_of(loss, tx=TX):
    gradient = lro.compact_value_and_grad(loss)

    @jax.jit
    def step(params, state, x):
        value, grads, bases = gradient(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return optax.apply_updates(params, updates), state, value

    return step


def train(step, params, state, x, steps=3):
    losses = []
    for _ in range(steps):
        params, state, value = step(params, state, x)
        losses.append(float(value))
    return losses, params, state


@functools.cache
def alone(tx=TX):
    losses, params, _ = train(steps_of(loss_of(), tx), PARAMS, tx.init(PARAMS), BATCH)
    return losses, jax.device_get(params)


def assert_same_training(kind, placement, tx=TX):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=KINDS[kind])
    explicit = [n for n, t in zip(mesh.axis_names, KINDS[kind], strict=True) if t == EXPLICIT]
    up, down, batch = (NamedSharding(mesh, spec) for spec in PLACEMENTS[placement])
    places = {"layers": {"up": up, "down": down}, "head": NamedSharding(mesh, P())}
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, places)
        state = jax.jit(tx.init)(params)
        step = steps_of(loss_of(placement, explicit), tx)
        losses, params, state = train(step, params, state, jax.device_put(BATCH, batch))
    expected_losses, expected = alone(tx)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert losses[-1] < 0.95 * losses[0]
    # Steps two and on divide by roots of tiny moments.
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-3)
    assert state.tracker_state.refreshes.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("explicit", "data"),
        ("explicit", "fsdp"),
        ("explicit", "fsdp_tp"),
        ("auto", "fsdp_tp"),
        ("explicit and auto", "fsdp_tp"),
        ("auto and explicit", "tp"),
    ],
)
def test_training_is_the_same_on_a_mesh(kind, placement):
    assert_same_training(kind, placement)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_so_it_is_with_a_sketched_residual(kind):
    assert_same_training(kind, "fsdp_tp", SKETCHED)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=["explicit", "auto"])
def test_all_reduced_bytes_are_r_over_m_of_full_gradients(kind):
    """Data parallel: what devices sum is cores, and the gradient of what is no target."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    loss = loss_of()
    compact = lro.compact_value_and_grad(loss)
    with jax.set_mesh(mesh):
        everywhere = NamedSharding(mesh, P())
        params = jax.device_put(PARAMS, everywhere)
        state = jax.jit(TX.init)(params)
        x = jax.device_put(BATCH, NamedSharding(mesh, P("data")))

        def reduced(gradient, *arguments):
            # As for the optimizer, which wants them on every device.
            jitted = jax.jit(gradient, out_shardings=everywhere)
            text = jitted.lower(*arguments).compile().as_text()
            found = collectives(text)
            assert set(bytes_by_kind(found)) <= {"all-reduce", "reduce-scatter", "all-gather"}
            sums = [c for c in found if c.kind != "all-gather"]
            return sum(c.bytes * c.times for c in sums), max(math.prod(c.shape) for c in sums)

        full, _ = reduced(lambda p, x: jax.grad(loss)(p, x), params, x)
        cores, largest = reduced(lambda p, s, x: compact(p, x, opt_state=s)[1], params, state, x)
    targets = 2 * LAYERS * WIDTH * HIDDEN * 4
    others = full - targets
    assert PARAMS["head"].nbytes <= others <= PARAMS["head"].nbytes + 8  # the loss, too
    assert cores - others == pytest.approx(targets * RANK / WIDTH, abs=8)
    assert largest < WIDTH * HIDDEN


ASKED = pytest.mark.skipif(shard_alike is None, reason="JAX 0.12 cannot be asked")


@pytest.mark.parametrize(
    "kind", [EXPLICIT, pytest.param(AUTO, marks=ASKED)], ids=["explicit", "auto"]
)
def test_cores_lie_as_the_moments_do(kind):
    """On mesh axes that the core's own side leaves over, too: also while a loop stacks them."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))
    explicit = mesh.axis_names if kind == EXPLICIT else ()
    up, down, batch = (NamedSharding(mesh, spec) for spec in PLACEMENTS["fsdp_tp"])
    places = {"layers": {"up": up, "down": down}, "head": NamedSharding(mesh, P())}
    rank = 3  # no weight has an axis of it
    tx = lro.galore_adamw(1e-2, rank, targets=[("up|down", rank), ("head", None)])
    compact = lro.compact_value_and_grad(loss_of("fsdp_tp", explicit))
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, places)
        shardings = lro.state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        gradient = jax.jit(lambda p, s, x: compact(p, x, opt_state=s)[1])
        compiled = gradient.lower(params, state, jax.device_put(BATCH, batch)).compile()
    moments = optax.tree.get(shardings, "mu")["layers"]
    for name, core in compiled.output_shardings["layers"].items():
        assert core.core.is_equivalent_to(moments[name], 3), name
    # No stack of cores that is whole on fsdp, in the refresh neither.
    assert f"f32[{LAYERS},{rank},{HIDDEN // 2}]" not in compiled.as_text()
