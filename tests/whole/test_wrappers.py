"""Under and over everything that optax, Flax and Equinox put around an optimizer."""

import functools
import pickle

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import lowrank_optax as lro
from tests.helpers.assertions import avals
from tests.helpers.data import at, layout, normal, random_like, sequence
from tests.helpers.flax_names import as_pure
from tests.helpers.loops import relaxed

pytestmark = pytest.mark.newest

PARAMS = {"tall": normal(0, (10, 6)), "bias": normal(1, (4,)), "w": normal(2, (6, 10))}
PROJECTED = ("tall", "w")


PLAIN, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)


@functools.cache
def ours(inner=MOMENTUM, every=3):
    """One object for equal options, so that tests share what is compiled."""
    return lro.galore_project(inner, lro.refresh_basis(2, every))


@functools.cache
def loop_of(tx, apply):
    @jax.jit
    def loop(params, state, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            after = optax.apply_updates(params, updates) if apply else params
            return (after, state), updates

        return jax.lax.scan(step, (params, state), gradients)

    return loop


def run(tx, params, gradients, apply=True):
    """All updates, and the state and params at the end, of a loop with an unchanging carry."""
    (params, state), updates = loop_of(tx, apply)(params, tx.init(params), gradients)
    return updates, state, params


def counts(state):
    return [np.asarray(x).tolist() for _, x in optax.tree.get_all_with_path(state, "refreshes")]


def assert_close(left, right, **tolerance):
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, two, **({"rtol": 1e-4, "atol": 1e-6} | tolerance))


# Matrix: transforms x wrappers x layouts x dtypes


TRANSFORMS = {
    "tracker": lambda tracker: optax.chain(tracker, optax.sgd(0.1)),
    "filter": lambda tracker: optax.chain(lro.galore_project(basis=tracker), optax.sgd(0.1)),
    "galore_sgd": lambda tracker: lro.galore_project(optax.sgd(0.1, 0.9), tracker),
    "galore_adamw": lambda tracker: lro.galore_project(
        relaxed(optax.adamw(0.1, weight_decay=0.1)), tracker, scale=0.5
    ),
}
AROUND = {
    "bare": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "rest": optax.sgd(0.1)},
        lambda p: jax.tree.map(lambda x: "ours" if x.ndim > 1 else "rest", p),
    ),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "lookahead": lambda tx: optax.lookahead(tx, 3, 0.5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1, b1=0.9),
}


@pytest.mark.parametrize("wrapper", AROUND)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_matrix(transform, wrapper):
    """Layouts and dtypes at once: types hold, everything moves, something is projected."""
    params, targets = {"bias": normal(9, (4,), jnp.bfloat16)}, []
    for name, dtype in (("wide", "float32"), ("tall", "bfloat16"), ("query", "float32"),
                        ("stack", "bfloat16")):  # fmt: skip
        shape, target = layout(name)
        params[name] = normal(len(params), shape, jnp.dtype(dtype))
        targets.append((f"^{name}$", target))
    # Random bases compile fast, and what is at stake here is everything around them.
    tracker = lro.refresh_basis(every=2, targets=targets, method="random")
    tx = AROUND[wrapper](TRANSFORMS[transform](tracker))
    tx = relaxed(optax.with_extra_args_support(tx))
    lookahead = wrapper == "lookahead"
    full = optax.LookaheadParams(params, params) if lookahead else params
    state = tx.init(full)
    update = jax.jit(tx.update)
    for step in range(2):
        updates, after = update(random_like(params, step), state, full)
        assert avals(after) == avals(state)
        state = after
    (refreshes,) = counts(state)
    assert refreshes == [1] * 4
    moved = updates.fast if lookahead else updates
    for path, x in params.items():
        assert moved[path].dtype == x.dtype or wrapper == "schedule_free", path
        assert np.asarray(moved[path], np.float32).any(), path
        assert np.isfinite(np.asarray(moved[path], np.float32)).all(), path


# What wrappers mean


def test_chain_and_clipping():
    gradients = sequence(PARAMS, 4)
    updates, state, _ = run(optax.chain(optax.clip(0.5), ours()), PARAMS, gradients)
    clipped = jax.tree.map(lambda g: jnp.clip(g, -0.5, 0.5), gradients)
    expected, _, _ = run(ours(), PARAMS, clipped)
    assert counts(state) == [[2, 2]]
    assert_close(updates, expected)


def test_partition_with_two_ranks():
    def low_rank(rank):
        return lro.galore_project(optax.sgd(0.1, 0.9), lro.refresh_basis(rank, 3))

    tx = optax.partition(
        {"low": low_rank(2), "high": low_rank(4), "rest": optax.sgd(0.1)},
        {"tall": "low", "w": "high", "bias": "rest"},
    )
    gradients = sequence(PARAMS, 4)
    updates, state, _ = run(tx, PARAMS, gradients)
    assert counts(state) == [[2], [2]]
    for path, rank in (("tall", 2), ("w", 4)):
        alone = run(low_rank(rank), {path: PARAMS[path]}, {path: gradients[path]})[0]
        # Their random starts differ, and so does what four iterations leave of them.
        assert np.linalg.matrix_rank(np.asarray(updates[path][0]), tol=1e-4) == rank
        assert np.linalg.matrix_rank(np.asarray(alone[path][0]), tol=1e-4) == rank
        norms = [np.linalg.norm(u[path][0]) for u in (updates, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=0.1)
    np.testing.assert_allclose(updates["bias"], -0.1 * gradients["bias"], rtol=1e-6)


def test_masked_around_ours_passes_the_rest_through():
    gradients = sequence(PARAMS, 4)
    tx = optax.masked(ours(), {"tall": False, "w": True, "bias": False})
    updates, state, _ = run(tx, PARAMS, gradients)
    assert counts(state) == [[2]]
    np.testing.assert_array_equal(updates["tall"], gradients["tall"])
    alone, _, _ = run(ours(), {"w": PARAMS["w"]}, {"w": gradients["w"]})
    assert_close(updates["w"], alone["w"])


def test_masked_inside_ours():
    inner = optax.chain(
        optax.masked(optax.trace(0.9), {"tall": False, "w": True, "bias": False}), optax.scale(-0.1)
    )
    gradients = sequence(PARAMS, 4)
    updates, state, _ = run(ours(inner), PARAMS, gradients)
    assert counts(state) == [[2, 2]]
    with_momentum = run(ours(), PARAMS, gradients)[0]
    without = run(ours(PLAIN), PARAMS, gradients)[0]
    assert_close(
        updates, {"w": with_momentum["w"], "tall": without["tall"], "bias": without["bias"]}
    )


def test_partition_inside_ours():
    inner = optax.partition(
        {"momentum": optax.sgd(0.1, 0.9), "plain": optax.sgd(0.1)},
        {"tall": "plain", "w": "momentum", "bias": "plain"},
    )
    gradients = sequence(PARAMS, 4)
    updates, _, _ = run(ours(inner), PARAMS, gradients)
    with_momentum = run(ours(), PARAMS, gradients)[0]
    without = run(ours(PLAIN), PARAMS, gradients)[0]
    assert_close(
        updates, {"w": with_momentum["w"], "tall": without["tall"], "bias": without["bias"]}
    )


def test_multi_steps_around_counts_whole_batches_only():
    """N micro-batches, one update, one count: 1, 2, 3 and not 1, 3, 5."""
    gradients = sequence(PARAMS, 12)
    tx = optax.MultiSteps(ours(every=2), 3).gradient_transformation()
    updates, state, after = run(relaxed(tx), PARAMS, gradients)
    means = jax.tree.map(lambda g: g.reshape(4, 3, *g.shape[1:]).mean(axis=1), gradients)
    expected, whole, after_whole = run(ours(every=2), PARAMS, means)
    assert optax.tree.get(state, "tracker_count") == 4
    assert counts(state) == counts(whole) == [[2, 2]]
    for path in PARAMS:
        for step in range(12):
            if step % 3 != 2:
                assert not np.asarray(updates[path][step]).any()
        assert_close(updates[path][2::3], expected[path], rtol=1e-3, atol=1e-4)
    assert_close(after, after_whole, rtol=1e-3, atol=1e-4)


def test_multi_steps_around_never_refreshes_on_half_a_batch():
    """MultiSteps computes its inner update at every mini-step, and throws away all but one."""
    gradients = sequence(PARAMS, 5)
    tx = relaxed(optax.MultiSteps(ours(every=1), 4).gradient_transformation())
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    seen = []
    for step in range(5):
        _, state = update(at(gradients, step), state, PARAMS)
        seen.append(counts(state)[0][0])
    assert seen == [0, 0, 0, 1, 1]


def test_multi_steps_inside_accumulates_cores():
    """The buffer is r x n and not m x n, and the mean over a batch is that of its cores."""
    inner = relaxed(optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation())
    gradients = sequence(PARAMS, 6)
    tx = ours(inner, every=100)
    updates, state, _ = run(tx, PARAMS, gradients, apply=False)
    buffers = state.inner_state.acc_grads
    assert buffers["w"].shape == (2, 10)
    assert buffers["tall"].shape == (10, 2)
    assert counts(state) == [[1, 1]]
    filtered = run(ours(PLAIN, every=100), PARAMS, gradients, apply=False)[0]
    for path in PARAMS:
        assert not np.asarray(updates[path])[[0, 1, 3, 4]].any()
        for last in (2, 5):
            expected = filtered[path][last - 2 : last + 1].mean(axis=0)
            np.testing.assert_allclose(updates[path][last], expected, atol=1e-5)


def test_inject_hyperparams_around():
    tx = optax.inject_hyperparams(
        lro.galore_adamw, static_args=("rank", "refresh_every", "method", "side", "moments", "seed")
    )(learning_rate=0.1, rank=2, refresh_every=3, scale=0.25)
    tx = relaxed(tx)
    gradients = at(sequence(PARAMS, 1), 0)
    state = tx.init(PARAMS)
    updates, after = jax.jit(tx.update)(gradients, state, PARAMS)
    assert counts(after) == [[1, 1]]
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    twice, _ = jax.jit(tx.update)(gradients, state, PARAMS)
    assert_close(twice, jax.tree.map(lambda u: 2 * u, updates))


@pytest.mark.parametrize("argument", ["rank", "refresh_every"])
def test_inject_hyperparams_without_static_args_is_an_error_that_names_them(argument):
    static = tuple({"rank", "refresh_every", "seed"} - {argument})
    tx = optax.inject_hyperparams(lro.galore_adamw, static_args=static)(
        learning_rate=0.1, rank=2, refresh_every=3
    )
    with pytest.raises(TypeError) as error:
        tx.init(PARAMS)
    # The type checks of the tests stand before the message that users see; both name it.
    assert argument.removeprefix("refresh_") in str(error.value)


def test_inject_hyperparams_inside():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.0, 0.3, 3))
    gradients = sequence(PARAMS, 4)
    updates, state, _ = run(ours(relaxed(inner)), PARAMS, gradients, apply=False)
    fixed = run(ours(PLAIN), PARAMS, gradients, apply=False)[0]
    assert counts(state) == [[2, 2]]
    for step in range(4):
        assert_close(at(updates, step), jax.tree.map(lambda u, s=step: u[s] * s, fixed), atol=1e-5)


@pytest.mark.parametrize("step", [0, 2, 3])
def test_apply_if_finite_a_nan_changes_nothing(step):
    """Also at a refresh: the next good step is the one that would have been."""
    gradients = sequence(PARAMS, 6)
    poisoned = jax.tree.map(lambda x: x, gradients)
    poisoned["w"] = poisoned["w"].at[step, 1, 1].set(jnp.nan)
    tx = optax.apply_if_finite(ours(), 5)
    updates, state, _ = run(tx, PARAMS, poisoned)
    clean = jax.tree.map(lambda g: jnp.delete(g, step, axis=0), gradients)
    expected, whole, _ = run(ours(), PARAMS, clean)
    for path in PARAMS:
        assert not np.asarray(updates[path][step]).any()
        assert_close(np.delete(updates[path], step, axis=0), expected[path])
    assert counts(state) == counts(whole)


def test_schedule_free():
    def loss(params):
        return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(params))

    tx = relaxed(optax.contrib.schedule_free(ours(PLAIN), 0.1, b1=0.9))
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(lambda p, s: tx.update(jax.grad(loss)(p), s, p))
    for _ in range(60):
        updates, state = update(params, state)
        params = optax.apply_updates(params, updates)
    averaged = optax.contrib.schedule_free_eval_params(state, params)
    assert counts(state) == [[20, 20]]
    assert float(loss(averaged)) < 0.05 * float(loss(PARAMS))


def test_lookahead():
    slow = optax.LookaheadParams(PARAMS, PARAMS)
    tx = relaxed(optax.lookahead(ours(), 2, 0.5))
    gradients = at(sequence(PARAMS, 1), 0)
    state, update = tx.init(slow), jax.jit(tx.update)
    params = slow
    for _ in range(4):
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert counts(state) == [[2, 2]]
    assert_close(params.fast, params.slow)
    assert np.abs(np.asarray(params.slow["w"] - PARAMS["w"])).max() > 1e-3


def test_params_ema_behind():
    tx = optax.chain(ours(), optax.ema(0.5, debias=False))
    gradients = sequence(PARAMS, 3)
    updates, state, _ = run(tx, PARAMS, gradients)
    alone, _, _ = run(ours(), PARAMS, gradients)
    assert counts(state) == [[1, 1]]
    assert_close(updates["w"][0], 0.5 * alone["w"][0])


# Finding things


@pytest.mark.parametrize("field", [*lro.TrackerState._fields, *lro.SubspaceState._fields])
def test_each_field_is_found_once(field):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), relaxed(lro.galore_adamw(0.1, 2, metrics=True))
    )
    state = tx.init(PARAMS)
    assert len(optax.tree.get_all_with_path(state, field)) == 1


def test_optax_names_inside_stay_findable():
    state = lro.galore_adamw(optax.constant_schedule(0.1), 2).init(PARAMS)
    for field in ("mu", "nu"):
        assert optax.tree.get(state, field)["w"].shape == (2, 10)


def test_map_params_and_the_state_that_it_returns():
    tx = optax.chain(optax.clip(1.0), relaxed(lro.galore_adamw(0.1, 2, 2)))
    _, state, _ = run(tx, PARAMS, sequence(PARAMS, 3))
    kinds = optax.tree.map_params(
        tx, lambda x: "param", state, transform_non_params=lambda x: "other"
    )
    assert set(jax.tree.leaves(optax.tree.get(kinds, "mu"))) == {"param"}
    assert set(jax.tree.leaves(optax.tree.get(kinds, "reduction_basis"))) == {"param"}
    assert optax.tree.get(kinds, "tracker_count") == "other"
    # Once more, as though nothing had happened, also with a state it made from nothing.
    mapped = optax.tree.map_params(tx, lambda x: x, state)
    gradients = random_like(PARAMS, 9)
    left, one = jax.jit(tx.update)(gradients, state, PARAMS)
    right, two = jax.jit(tx.update)(gradients, mapped, PARAMS)
    assert_close(left, right, rtol=0, atol=0)
    assert counts(one) == counts(two)
    assert optax.tree.get(two, "plan") == optax.tree.get(state, "plan")


def test_a_mapped_state_has_its_plan_and_needs_no_program_compiled_before():
    """Its plan had no leaves: the next update failed, unless one was compiled already."""
    tx = optax.chain(optax.clip(1.0), relaxed(lro.galore_adamw(0.1, 2, 2, metrics=True)))
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x, state)
    assert optax.tree.get(mapped, "plan") == optax.tree.get(state, "plan")
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    jax.clear_caches()
    updates, mapped = tx.update(random_like(PARAMS, 9), mapped, PARAMS)
    assert np.linalg.matrix_rank(updates["w"]) == 2
    assert lro.metrics(mapped).leaves.keys() == {
        p.path for p in optax.tree.get(state, "plan").projections
    }


def test_mapping_what_is_no_parameter_reaches_the_plan_as_a_whole():
    tx = lro.galore_adamw(0.1, 2)
    state = tx.init(PARAMS)
    seen = []
    optax.tree.map_params(tx, lambda x: x, state, transform_non_params=seen.append)
    assert any(other is state.tracker_state.plan for other in seen)


# JAX


def test_vmap_over_an_ensemble():
    ensemble = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), PARAMS)
    gradients = [random_like(ensemble, step) for step in range(4)]
    tx = ours()
    state, update = jax.vmap(tx.init)(ensemble), jax.jit(jax.vmap(tx.update))
    singles = [tx.init(at(ensemble, i)) for i in range(3)]
    alone = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(gradient, state, ensemble)
        for i in range(3):
            expected, singles[i] = alone(at(gradient, i), singles[i], at(ensemble, i))
            assert_close(at(updates, i), expected, rtol=1e-3, atol=1e-4)
    assert state.tracker_state.refreshes.tolist() == [[2, 2]] * 3


def test_donation():
    tx = relaxed(lro.galore_adamw(0.1, 2, 2))
    step = jax.jit(tx.update, donate_argnums=1)
    state, kept = tx.init(PARAMS), tx.init(PARAMS)
    for number in range(3):
        gradients = random_like(PARAMS, number)
        donated = state
        updates, state = step(gradients, state, PARAMS)
        expected, kept = jax.jit(tx.update)(gradients, kept, PARAMS)
        assert_close(updates, expected)
        # No two leaves share a buffer, which XLA would refuse, and every one is given up.
        assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert counts(state) == [[2, 2]]


def test_checkpoint_of_the_gradient_of_an_update():
    """A step may itself be differentiated, as meta-learning does."""

    @jax.grad
    def meta(rate):
        tx = lro.galore_project(optax.sgd(rate), lro.refresh_basis(2, method="random"))
        updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        return jnp.sum(updates["w"] ** 2)

    assert np.isfinite(meta(0.1))
    assert float(meta(0.1)) > 0


# Frameworks


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(16, name="inner")(x)))


X = normal(5, (32, 8))
Y = jnp.tanh(X[:, :3])


def test_flax_linen_train_state():
    model = Mlp()
    variables = model.init(jax.random.key(0), X)
    tx = relaxed(lro.galore_adamw(0.03, targets=[("inner/kernel", 4)], refresh_every=5))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, X) - Y) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    losses = []
    for _ in range(30):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    assert counts(state.opt_state) == [[6]]
    assert optax.tree.get(state.opt_state, "mu")["inner"]["kernel"].shape == (4, 16)


def test_flax_linen_boxed_params():
    """init sees boxes with names of mesh axes, and the state has boxes of its own."""
    model = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.normal(), ("x", "y")))
    params = model.init(jax.random.key(0), X)["params"]
    assert isinstance(params["kernel"], nn.Partitioned)
    tx = ours()
    state = tx.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(tx.update)(gradients, state, params)
    assert counts(state) == [[1]]
    assert updates["kernel"].value.shape == (8, 16)
    assert optax.apply_updates(params, updates)["kernel"].names == ("x", "y")


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


def test_nnx_optimizer():
    model = NnxMlp(nnx.Rngs(0))
    tx = relaxed(lro.galore_adamw(0.03, targets=[("^inner/kernel$", 4)], refresh_every=5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    pure = as_pure(optimizer.opt_state)
    assert counts(pure) == [[6]]


def test_equinox_training_loop():
    """Equinox marks what is no parameter with None."""
    model = eqx.nn.MLP(8, 3, 16, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert any(x is None for x in jax.tree.leaves(params, is_leaf=lambda x: x is None))
    # Equinox stores (out, in): its weights are read from the right.
    targets = [("layers/0/weight", lro.Target(4, reduction_axis=1, output_axis=0))]
    tx = relaxed(lro.galore_adamw(0.03, targets=targets, refresh_every=5))

    @eqx.filter_jit
    def step(params, state):
        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(X) - Y) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return eqx.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    assert counts(state) == [[6]]


# Round trips


@pytest.mark.parametrize("way", ["pickle", "flax_bytes", "flax_state_dict", "leaves"])
def test_round_trips(way):
    tx = relaxed(lro.galore_adamw(0.1, 2, 3, metrics=True))
    _, state, _ = run(tx, PARAMS, sequence(PARAMS, 2))
    fresh = tx.init(PARAMS)
    if way == "pickle":
        restored = pickle.loads(pickle.dumps(state))
    elif way == "flax_bytes":
        restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))
    elif way == "flax_state_dict":
        raw = flax.serialization.to_state_dict(state)
        restored = flax.serialization.from_state_dict(fresh, raw)
    else:
        restored = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    gradients = random_like(PARAMS, 9)
    left, one = jax.jit(tx.update)(gradients, state, PARAMS)
    right, two = jax.jit(tx.update)(gradients, restored, PARAMS)
    assert_close(left, right, rtol=0, atol=0)
    assert_close(one, two, rtol=0, atol=0)
