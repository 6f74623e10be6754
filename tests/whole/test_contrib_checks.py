"""The checks that optax runs on its own contributed optimizers, on ours.

Its targets are vectors and 2 x 2 matrices, on which a low-rank optimizer projects nothing;
so ours are matrices, and every test asserts that one was projected.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import avals
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

pytestmark = pytest.mark.newest

TABLE = [("^w$", 2)]


def tracker(**options):
    return lro.refresh_basis(every=4, targets=TABLE, **options)


OPTIMIZERS = {
    "galore_adamw": lambda: lro.galore_adamw(0.1, 2, 4, targets=TABLE),
    "galore_adamw_decay": lambda: lro.galore_adamw(0.1, 2, 4, weight_decay=1e-3, targets=TABLE),
    "galore_sgd": lambda: lro.galore_project(optax.sgd(0.1, 0.5), tracker()),
    "galore_both": lambda: lro.galore_project(optax.adam(0.08), tracker(side="both")),
    "galore_random": lambda: lro.galore_project(optax.adam(0.08), tracker(method="random")),
    "logra_adamw": lambda: lro.logra_adamw(0.1, 2, targets=TABLE),
    "logra_untied": lambda: lro.logra_sketch(
        optax.sgd(0.1, 0.5), lro.learn_basis(targets=TABLE, tied=False)
    ),
    "filter": lambda: optax.chain(lro.galore_project(basis=tracker()), optax.sgd(0.1)),
}
# What converges to the exact minimum: weight decay pulls away from it.
CONVERGING = [name for name in OPTIMIZERS if name != "galore_adamw_decay"]


def parabola(dtype):
    params = {"w": jnp.zeros((6, 4), dtype), "bias": jnp.array([-1.0, 10.0, 1.0], dtype)}
    final = {"w": normal(0, (6, 4), dtype), "bias": jnp.array([1.0, -1.0, 1.0], dtype)}

    def objective(params):
        return sum(
            jnp.sum(jnp.square((p - f).astype(jnp.float32)))
            for p, f in zip(jax.tree.leaves(params), jax.tree.leaves(final), strict=True)
        )

    return params, final, objective


def rosenbrock(dtype):
    """Rosenbrock's function of the two halves of a matrix, entry by entry."""
    params = {"w": 0.5 * jnp.ones((6, 4), dtype), "bias": jnp.ones(3, dtype)}
    final = jax.tree.map(jnp.ones_like, params)

    def objective(params):
        x, y = params["w"][:3], params["w"][3:]
        return jnp.sum((1 - x) ** 2 + 5 * (y - x**2) ** 2) + jnp.sum((params["bias"] - 1) ** 2)

    return params, final, objective


def projected(state):
    """Whether a basis was kept and refreshed in a state."""
    (found,) = (x for _, x in optax.tree.get_all_with_path(state, "refreshes"))
    return found.size == 1 and int(found[0]) > 0


@pytest.mark.parametrize("problem", [parabola, rosenbrock])
@pytest.mark.parametrize("name", CONVERGING)
def test_converges(name, problem):
    params, final, objective = problem(jnp.float32)
    decay = optax.exponential_decay(1.0, 500, 0.3)
    tx = optax.chain(relaxed(OPTIMIZERS[name]()), relaxed(optax.scale_by_schedule(decay)))
    if problem is rosenbrock:
        tx = optax.chain(optax.clip(1.0), tx, optax.scale(0.3))

    @jax.jit
    def run(params, state):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(objective)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), length=3000)[0]

    after, state = run(params, tx.init(params))
    assert projected(state)
    assert float(objective(after)) < 1e-2 * float(objective(params))
    for path in params:
        np.testing.assert_allclose(after[path], final[path], atol=0.15)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accepts_extra_args_and_does_not_compile_twice(name):
    params, _, objective = parabola(jnp.float32)
    tx = relaxed(OPTIMIZERS[name]())
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(1)
        gradients = jax.grad(objective)(params)
        updates, state = tx.update(gradients, state, params, an_argument_nobody_expects=1)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert len(traces) == 1
    assert projected(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_jit_and_no_jit_agree(name):
    params, _, objective = parabola(jnp.float32)
    tx = relaxed(OPTIMIZERS[name]())
    eager, compiled = tx.init(params), jax.jit(tx.init)(params)
    np.testing.assert_allclose(
        *(
            jnp.concatenate([x.ravel().astype(jnp.float32) for x in jax.tree.leaves(s)])
            for s in (eager, compiled)
        ),
        atol=1e-5,
    )
    update = jax.jit(tx.update)
    gradients = jax.grad(objective)(params)
    left, state = tx.update(gradients, eager, params)
    right, _ = update(gradients, eager, params)
    assert projected(state)
    for path in params:
        np.testing.assert_allclose(left[path], right[path], rtol=1e-3, atol=1e-5)


STATIC = ("rank", "refresh_every", "method", "side", "moments", "stagger", "metrics", "seed")


def test_inject_hyperparams_gives_equal_updates_and_states():
    params, _, objective = parabola(jnp.float32)
    hyperparams = {
        "learning_rate": 0.1, "rank": 2, "refresh_every": 4, "scale": 0.3, "weight_decay": 0.1,
        "targets": TABLE,
    }  # fmt: skip
    assert set(STATIC) <= set(inspect.signature(lro.galore_adamw).parameters)
    plain = relaxed(lro.galore_adamw(**hyperparams))
    injected = relaxed(
        optax.inject_hyperparams(lro.galore_adamw, static_args=(*STATIC, "targets"))(**hyperparams)
    )
    states = [plain.init(params), injected.init(params)]
    gradients = jax.grad(objective)(params)
    for _ in range(2):
        left, states[0] = jax.jit(plain.update)(gradients, states[0], params)
        right, states[1] = jax.jit(injected.update)(gradients, states[1], params)
        for path in params:
            np.testing.assert_allclose(left[path], right[path], rtol=1e-4, atol=1e-6)
    assert projected(states[1])
    assert float(states[1].hyperparams["scale"]) == pytest.approx(0.3)
    inner = states[1].inner_state
    for one, two in zip(jax.tree.leaves(inner), jax.tree.leaves(states[0]), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_of_updates_and_avals_of_state(name, dtype):
    params, _, objective = parabola(jnp.dtype(dtype))
    tx = relaxed(OPTIMIZERS[name]())
    state = tx.init(params)
    gradients = jax.grad(objective)(params)
    updates, after = jax.jit(tx.update)(gradients, state, params)
    for path in params:
        assert updates[path].dtype == params[path].dtype
    assert avals(after) == avals(state)
    assert projected(after)
    # What lax.cond asks of two branches, of which one updates and one does not.
    choose = jax.jit(
        lambda flag: jax.lax.cond(
            flag, lambda: tx.update(gradients, state, params), lambda: (gradients, state)
        )
    )
    jax.eval_shape(choose, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_accumulation(dtype):
    params, _, objective = parabola(jnp.dtype(dtype))
    tx = relaxed(optax.MultiSteps(OPTIMIZERS["galore_adamw"](), 4).gradient_transformation())
    state = tx.init(params)
    gradients = jax.grad(objective)(params)
    update = jax.jit(tx.update)
    for step in range(4):
        updates, state = update(gradients, state, params)
        moved = any(np.asarray(u, np.float32).any() for u in jax.tree.leaves(updates))
        assert moved == (step == 3)
    assert projected(state)


def test_schedule_and_number_agree():
    params, _, objective = parabola(jnp.float32)
    gradients = jax.grad(objective)(params)
    number = relaxed(lro.galore_adamw(0.01, 2, 4, targets=TABLE))
    schedule = relaxed(lro.galore_adamw(optax.constant_schedule(0.01), 2, 4, targets=TABLE))
    left, state = jax.jit(number.update)(gradients, number.init(params), params)
    right, _ = jax.jit(schedule.update)(gradients, schedule.init(params), params)
    assert projected(state)
    for path in params:
        np.testing.assert_allclose(left[path], right[path], rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_map_params_is_a_no_op_that_keeps_the_state_working(name):
    params, _, objective = parabola(jnp.float32)
    tx = relaxed(OPTIMIZERS[name]())
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x, state)
    gradients = jax.grad(objective)(params)
    left, _ = jax.jit(tx.update)(gradients, state, params)
    right, after = jax.jit(tx.update)(gradients, mapped, params)
    assert projected(after)
    for path in params:
        np.testing.assert_array_equal(left[path], right[path])
