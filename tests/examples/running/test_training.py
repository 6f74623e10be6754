"""The training step and the loop around it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from running import training
from running.errors import UserError

pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_fn(params, tokens):
    return jnp.mean((tokens.astype(jnp.float32) @ params["w"].astype(jnp.float32)) ** 2)


@pytest.fixture
def params():
    return {"w": jax.random.normal(jax.random.key(0), (5, 3))}


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(1), (8, 5), 0, 4)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_is_the_same_step(params, tokens, micro_batches):
    tx = optax.with_extra_args_support(optax.adamw(optax.linear_schedule(1e-2, 0.0, 5)))
    results = []
    for parts in (1, micro_batches):
        step = training.make_train_step(training.full_gradients(loss_fn, parts), tx)
        trained, opt_state, metrics = jax.tree.map(jnp.copy, params), tx.init(params), {}
        for _ in range(3):
            trained, opt_state, metrics = step(trained, opt_state, tokens)
        results.append((trained, opt_state, metrics))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), *results)
    assert optax.tree.get(results[1][1], "count", filtering=_is_schedule) == 3


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_matrix_free_training_is_the_same(params, tokens, micro_batches):
    tx = lro.galore_project(optax.sgd(1e-2), lro.refresh_basis(2, every=2, method="random"))
    results = []
    for make in (training.full_gradients, training.compact_gradients):
        step = training.make_train_step(make(loss_fn, micro_batches), tx)
        trained, opt_state = jax.tree.map(jnp.copy, params), tx.init(params)
        for _ in range(5):
            trained, opt_state, metrics = step(trained, opt_state, tokens)
        results.append((trained, opt_state, metrics["loss"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), *results)
    assert not np.allclose(results[1][0]["w"], params["w"])


def _is_schedule(path, _):
    return any(getattr(entry, "tuple_name", None) == "ScaleByScheduleState" for entry in path)


def test_accumulated_gradients_keep_the_type_of_the_parameters(params, tokens):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loss, grads, extra = training.full_gradients(loss_fn, 2)(params, tokens, ())
    assert (grads["w"].dtype, loss.dtype, extra) == (jnp.bfloat16, jnp.float32, {})


@pytest.mark.parametrize("make", [training.full_gradients, training.compact_gradients])
def test_batches_may_be_pytrees_and_losses_have_constants(params, tokens, make):
    def loss(params, batch, constants):
        error = batch["x"] @ params["w"] - constants["shift"]
        return jnp.mean(batch["weight"][:, None] * error**2)

    batch = {"x": tokens.astype(jnp.float32), "weight": jnp.arange(8.0)}
    constants = {"shift": jnp.ones(3)}
    tx = lro.galore_project(optax.sgd(1e-2), lro.refresh_basis(2, method="random"))
    state = tx.init(params)
    whole, parts = (make(loss, number)(params, batch, state, constants)[:2] for number in (1, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, parts)
    assert whole[0] == pytest.approx(float(loss(params, batch, constants)), rel=1e-5)


def test_tokens_are_counted_where_there_are_any():
    assert training.count_tokens(np.zeros((4, 9))) == 32
    assert training.count_tokens({"segments": np.array([[1, 2, 2, 0]])}) == 3


def test_extra_arguments_of_the_gradients_reach_the_optimizer(params, tokens):
    def gradients(params, tokens, opt_state):
        loss, grads, _ = training.full_gradients(loss_fn)(params, tokens, opt_state)
        return loss, grads, {"factor": opt_state[1]["next"]}

    def init(params):
        return {"next": jnp.zeros(())}

    def update(updates, state, params=None, **extra):
        moved = jax.tree.map(lambda g: -extra["factor"] * g, updates)
        return moved, {"next": state["next"] + 1}

    inner = optax.GradientTransformationExtraArgs(init, update)
    tx = optax.chain(optax.clip_by_global_norm(1e9), inner)
    step = training.make_train_step(gradients, tx)
    start = np.array(params["w"])  # a copy: the step takes the memory
    new, state, _ = step(params, tx.init(params), tokens)
    np.testing.assert_array_equal(new["w"], start)  # the factor was 0
    new, _, _ = step(new, state, tokens)
    assert not np.array_equal(new["w"], start)


def test_the_step_reuses_the_memory_of_its_arguments(params, tokens):
    tx = optax.with_extra_args_support(optax.adam(1e-3))
    state = tx.init(params)
    training.make_train_step(training.full_gradients(loss_fn), tx)(params, state, tokens)
    assert params["w"].is_deleted()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)


def test_evaluation_weighs_batches_by_their_size(params):
    rows = np.arange(35).reshape(7, 5) % 4
    evaluate = training.make_evaluate(loss_fn)
    expected = float(loss_fn(params, jnp.asarray(rows)))
    assert evaluate(params, [rows[:3], rows[3:6], rows[6:]]) == pytest.approx(expected, rel=1e-5)


def test_bytes_are_those_of_the_arrays():
    tree = {"a": jnp.zeros((3, 4)), "b": (jnp.zeros(5, jnp.bfloat16), optax.MaskedNode(), None)}
    assert training.count_bytes(tree) == 48 + 10
    assert training.count_bytes(jax.eval_shape(lambda: tree)) == 58


def test_a_loss_that_is_not_finite_stops_the_run():
    class Corpus:
        def batch(self, seed, step, size):
            return np.zeros((1, 2), np.int32)

    saved = []
    settings = training.Settings(steps=9, batch_size=1, seed=0, eval_every=5, save_every=2)

    class Observer:
        def step(self, step, metrics): ...

    def train_step(params, opt_state, tokens):
        loss = jnp.where(params["n"] < 3, 1.0, jnp.nan)
        return {"n": params["n"] + 1}, opt_state, {"loss": loss, "grad_norm": loss}

    with pytest.raises(UserError, match="the loss is nan at step 4: lower --lr"):
        training.train(
            ({"n": jnp.array(0)}, ()),
            0,
            train_step=train_step,
            evaluate=lambda params, batches: 0.0,
            corpus=Corpus(),  # pyright: ignore[reportArgumentType]
            schedule=optax.constant_schedule(1.0),
            settings=settings,
            observer=Observer(),
            save=lambda step, state: saved.append(step),
        )
    assert saved == [2]
