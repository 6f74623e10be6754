import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._optimizers import logra, lowrank
from tests.helpers.assertions import avals, unchecked
from tests.helpers.data import normal, regression, sequence
from tests.helpers.loops import relaxed, train

PARAMS = {"w": normal(0, (6, 10)), "bias": normal(1, (4,))}
ARGUMENTS = {
    "learning_rate": optax.linear_schedule(0.0, 0.1, 3),
    "rank": 2,
    "refresh_every": 2,
    "scale": 0.5,
    "b1": 0.8,
    "b2": 0.95,
    "eps": 1e-3,
    "weight_decay": 0.3,
}


def updates_of(tx, steps=5):
    gradients = sequence(PARAMS, steps)

    @jax.jit
    def run(gradients, state):
        def step(state, gradient):
            updates, state = tx.update(gradient, state, PARAMS)
            return state, updates

        return jax.lax.scan(step, state, gradients)

    return run(gradients, tx.init(PARAMS))


def test_galore_adamw_is_its_parts():
    parts = lro.galore_project(
        optax.adamw(ARGUMENTS["learning_rate"], 0.8, 0.95, 1e-3, weight_decay=0.3),
        lro.refresh_basis(2, 2),
        scale=0.5,
    )
    state, updates = updates_of(relaxed(lro.galore_adamw(**ARGUMENTS)))
    other, expected = updates_of(relaxed(parts))
    assert state.tracker_state.refreshes.tolist() == [3]
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for path in PARAMS:
        np.testing.assert_array_equal(updates[path], expected[path])


@pytest.mark.parametrize(
    ("option", "check"),
    [
        ({"method": "frozen"}, lambda s: s.tracker_state.refreshes.tolist() == [1]),
        ({"side": "output"}, lambda s: s.tracker_state.output_basis["w"].shape == (10, 2)),
        ({"moments": "keep"}, lambda s: True),
        ({"mask": {"w": False, "bias": True}}, lambda s: True),
        ({"mu_dtype": jnp.bfloat16}, lambda s: optax.tree.get(s, "mu")["w"].dtype == jnp.bfloat16),
        ({"metrics": True}, lambda s: float(lro.metrics(s).leaves["w"].energy) > 0),
        ({"seed": 3}, lambda s: True),
        ({"targets": [("w", 3)]}, lambda s: optax.tree.get(s, "mu")["w"].shape == (3, 10)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_every_option_arrives(option, check):
    state, updates = updates_of(relaxed(lro.galore_adamw(**(ARGUMENTS | option))))
    assert check(state)
    _, plain = updates_of(relaxed(lro.galore_adamw(**ARGUMENTS)))
    same = np.array_equal(updates["w"], plain["w"])
    assert same == (next(iter(option)) == "metrics")


def test_stagger_arrives():
    params = {name: normal(i, (6, 10)) for i, name in enumerate("ac")}
    tx = relaxed(lro.galore_adamw(0.1, 2, 4, stagger=True))
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert state.tracker_state.next_refresh.tolist() == [4, 2]


def test_defaults_are_those_that_the_paper_and_optax_use():
    defaults = {
        name: p.default for name, p in inspect.signature(lro.galore_adamw).parameters.items()
    }
    adam = inspect.signature(optax.adamw).parameters
    for name in ("b1", "b2", "eps"):
        assert defaults[name] == adam[name].default
    assert defaults["scale"] == 0.25
    assert defaults["rank"] == 128
    assert defaults["refresh_every"] == 200
    assert defaults["weight_decay"] == 0.0


def test_galore_adamw_trains():
    params, gradient_fn = regression()
    tx = relaxed(lro.galore_adamw(0.05, 4, 10, targets=[("hidden/kernel", 4)]))
    losses, _, state = train(tx, params, gradient_fn, 80)
    assert losses[-1] < 0.5 * losses[0]
    assert state.tracker_state.refreshes.tolist() == [8]
    assert avals(state) == avals(tx.init(params))


def test_lowrank_adamw_is_its_parts():
    parts = lro.galore_project(
        optax.adamw(ARGUMENTS["learning_rate"], 0.8, 0.95, 1e-3, weight_decay=0.3),
        lro.refresh_basis(2, 2, method="random", dtype=jnp.bfloat16, seed=3),
        scale=0.5,
        lift=lro.sketched_residual_lift(2, seed=3),
    )
    state, updates = updates_of(relaxed(lro.lowrank_adamw(**ARGUMENTS, extra=2, seed=3)))
    _, expected = updates_of(relaxed(parts))
    assert state.tracker_state.reduction_basis["w"].dtype == jnp.bfloat16
    for path in PARAMS:
        np.testing.assert_array_equal(updates[path], expected[path])


def test_every_option_of_lowrank_adamw_arrives(monkeypatch):
    calls = {}

    def record(name):
        return lambda *args, **kwargs: calls.setdefault(name, (args, kwargs)) and name

    for name in ("refresh_basis", "sketched_residual_lift", "galore_project", "plain_adamw"):
        monkeypatch.setattr(lowrank, name, record(name))
    asked = {name: object() for name in inspect.signature(lro.lowrank_adamw).parameters}
    assert unchecked(lro.lowrank_adamw)(**asked) == "galore_project"
    tracker = {name: asked[name] for name in ("side", "targets", "stagger", "seed")}
    tracker |= {"method": "random", "dtype": jnp.bfloat16}
    assert calls["refresh_basis"] == ((asked["rank"], asked["refresh_every"]), tracker)
    assert calls["sketched_residual_lift"] == ((asked["extra"],), {"seed": asked["seed"]})
    project = {name: asked[name] for name in ("scale", "moments", "metrics")}
    project["lift"] = "sketched_residual_lift"
    assert calls["galore_project"] == (("plain_adamw", "refresh_basis"), project)
    adam = ("learning_rate", "b1", "b2", "eps", "weight_decay", "mask", "mu_dtype")
    assert calls["plain_adamw"] == (tuple(asked[name] for name in adam), {})
    assert len(asked) == 2 + (len(tracker) - 2) + 1 + (len(project) - 1) + len(adam)


def test_lowrank_adamw_refuses_bases_on_both_sides():
    with pytest.raises(ValueError, match=r"'w'.*another side"):
        lro.lowrank_adamw(0.1, 2, side="both").init(PARAMS)


LOGRA = {k: v for k, v in ARGUMENTS.items() if k != "refresh_every"} | {"basis_learning_rate": 2.0}


def test_logra_adamw_is_its_parts():
    parts = lro.logra_sketch(
        optax.adamw(ARGUMENTS["learning_rate"], 0.8, 0.95, 1e-3, weight_decay=0.3),
        lro.learn_basis(2, learning_rate=2.0),
        scale=0.5,
    )
    state, updates = updates_of(relaxed(lro.logra_adamw(**LOGRA)))
    other, expected = updates_of(relaxed(parts))
    assert state.tracker_state.refreshes.tolist() == [5]
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for path in PARAMS:
        np.testing.assert_array_equal(updates[path], expected[path])


def test_every_option_of_logra_adamw_arrives(monkeypatch):
    calls = {}

    def record(name):
        return lambda *args, **kwargs: calls.setdefault(name, (args, kwargs)) and name

    for name in ("learn_basis", "logra_sketch", "plain_adamw"):
        monkeypatch.setattr(logra, name, record(name))
    asked = {name: object() for name in inspect.signature(lro.logra_adamw).parameters}
    assert unchecked(lro.logra_adamw)(**asked) == "logra_sketch"
    tracker = {name: asked[name] for name in ("every", "tied", "init", "side")}
    tracker |= {name: asked[name] for name in ("targets", "seed")}
    tracker["learning_rate"] = asked["basis_learning_rate"]
    assert calls["learn_basis"] == ((asked["rank"],), tracker)
    sketch = {name: asked[name] for name in ("scale", "nonlinearity", "moments", "metrics")}
    assert calls["logra_sketch"] == (("plain_adamw", "learn_basis"), sketch)
    adam = ("learning_rate", "b1", "b2", "eps", "weight_decay", "mask", "mu_dtype")
    assert calls["plain_adamw"] == (tuple(asked[name] for name in adam), {})
    assert len(asked) == 1 + len(tracker) + len(sketch) + len(adam)


def test_a_hundredth_of_the_main_learning_rate():
    schedule = optax.linear_schedule(0.0, 100.0, 3)
    for main, rate in ((schedule, lambda t: schedule(t) / 100), (50.0, 0.5)):
        tx = lro.logra_adamw(main, 2, "main/100", init="random")
        state, _ = updates_of(relaxed(tx))
        inner = optax.adam(main)
        expected, _ = updates_of(
            relaxed(lro.logra_sketch(inner, lro.learn_basis(2, learning_rate=rate, init="random")))
        )
        np.testing.assert_array_equal(
            state.tracker_state.reduction_basis["w"], expected.tracker_state.reduction_basis["w"]
        )
    with pytest.raises(ValueError, match="basis_learning_rate='main/10' is not one of 'main/100'"):
        lro.logra_adamw(0.1, 2, "main/10")


def test_logra_adamw_takes_injected_hyperparameters():
    tx = optax.inject_hyperparams(lro.logra_adamw, static_args=("rank", "every", "seed"))(
        learning_rate=0.1, rank=2, basis_learning_rate=1.0
    )
    params = {"w": PARAMS["w"]}
    _, state = jax.jit(relaxed(tx).update)(params, relaxed(tx).init(params), params)
    assert float(state.hyperparams["basis_learning_rate"]) == 1.0


def test_constructor_errors_name_the_argument():
    with pytest.raises(ValueError, match="rank=0"):
        lro.galore_adamw(0.1, 0)
    with pytest.raises(ValueError, match="every=0"):
        lro.galore_adamw(0.1, 2, 0)
    with pytest.raises(ValueError, match="method='qr'"):
        lro.galore_adamw(0.1, 2, method="qr")


@pytest.mark.parametrize("name", ["fira_adamw", "apollo_adamw"])
def test_lifted_adamw_is_its_parts(name):
    method, lift, moments = {
        "fira_adamw": ("subspace", lro.fira_lift(1.5), "rotate"),
        "apollo_adamw": ("random", lro.apollo_lift(limit=1.5), "keep"),
    }[name]
    parts = lro.galore_project(
        optax.adamw(ARGUMENTS["learning_rate"], 0.8, 0.95, 1e-3, weight_decay=0.3),
        lro.refresh_basis(2, 2, method=method),
        scale=0.5,
        lift=lift,
        moments=moments,
    )
    _, updates = updates_of(relaxed(getattr(lro, name)(**ARGUMENTS, limit=1.5)))
    _, expected = updates_of(relaxed(parts))
    for path in PARAMS:
        np.testing.assert_array_equal(updates[path], expected[path])


@pytest.mark.parametrize("name", ["fira_adamw", "apollo_adamw"])
def test_lifted_adamw_shares_the_arguments_of_galore_adamw(name):
    shared = inspect.signature(lro.galore_adamw).parameters
    mine = inspect.signature(getattr(lro, name)).parameters
    own = {"fira_adamw": {"limit"}, "apollo_adamw": {"limit", "per"}}[name]
    assert set(mine) - set(shared) == own
    assert set(shared) - set(mine) == ({"method"} if name == "apollo_adamw" else set())
    assert [n for n in mine if n not in own] == [n for n in shared if n in mine]
    # Every argument arrives.
    base = updates_of(relaxed(getattr(lro, name)(**ARGUMENTS)))[1]["w"]
    changes = {
        "side": "output",
        "moments": "reset",
        "mask": {"w": False, "bias": True},
        "mu_dtype": jnp.bfloat16,
        "seed": 3,
        "targets": [("w", 3)],
        "limit": None,
        "method": "random",
        "per": "tensor",
    }
    for option in set(changes) & set(mine):
        changed = getattr(lro, name)(**(ARGUMENTS | {option: changes[option]}))
        assert not np.array_equal(updates_of(relaxed(changed))[1]["w"], base), option


def test_apollo_mini_keeps_next_to_nothing():
    params = {"w": jnp.zeros((64, 64))}
    tx = lro.apollo_adamw(1e-3, rank=1, per="tensor", targets=[("w", 1)])
    # Two moments of a row, the basis, and the limiter.
    assert lro.describe(tx, params).state_bytes < 4 * (2 * 64 + 64 + 16)
