"""When ranks are proposed, and that training goes on smoothly over the change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._ranks.growth import principal_angle
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

PARAMS = {"a": normal(0, (8, 12)), "s": normal(1, (2, 10, 8)), "b": jnp.ones(5)}
STACK = lro.Target(2, 1, 2)


@functools.cache
def tx(rank=2, every=3, metrics=True):
    targets = [("^a$", rank), ("^s$", STACK)]
    tracker = lro.refresh_basis(every=every, targets=targets, method="svd")
    return lro.galore_project(optax.sgd(0.1), tracker, metrics=metrics)


def gradients(rank, seed=0):
    """Gradients of a rank for "a", and of rank 1 for the stack."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(8, rank)))[0]
    right = np.linalg.qr(rng.normal(size=(12, rank)))[0]
    stack = np.einsum("li,lj->lij", rng.normal(size=(2, 10)), rng.normal(size=(2, 8)))
    tree = {"a": left @ right.T, "s": stack, "b": np.ones(5)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def states(optimizer, trees):
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    for tree in trees:
        _, state = update(tree, state, PARAMS)
        yield state


def ranks(table):
    return None if table is None else {p.strip("^$"): t.rank for p, t in table}


def test_residual_energy_over_a_window():
    """A gradient of rank 6 in rank 2 leaves two thirds out, in three calls in a row."""
    growth = lro.RankGrowth(residual=0.5, window=3, cooldown=0)
    trees = [gradients(1), *[gradients(6)] * 4]  # the first one is held whole
    seen = [ranks(growth(s, i)) for i, s in enumerate(states(tx(every=100), trees))]
    # Means over three calls: (0, x, x), and then (x, x, x), with x of about 2/3 or more.
    assert seen[:2] == [None, None]
    assert {"a": 4, "s": 2} in seen[2:4]
    # A fresh window, so nothing follows at once.
    assert seen[4] is None


def test_what_fits_does_not_grow():
    growth = lro.RankGrowth(residual=0.01, angle=30.0, window=1, cooldown=0)
    for step, state in enumerate(states(tx(), [gradients(2)] * 8)):
        assert growth(state, step) is None


def test_cooldown_and_cap():
    growth = lro.RankGrowth(residual=0.1, window=1, cooldown=3, factor=1.5, cap=4)
    trees = [gradients(6)] * 4
    seen = [ranks(growth(s, 10 + i)) for i, s in enumerate(states(tx(), trees))]
    assert [None if r is None else r["a"] for r in seen] == [3, None, None, 3]
    # At the cap there is nothing to propose.
    at_cap = [growth(s, 100 + i) for i, s in enumerate(states(tx(4), trees[:2]))]
    assert at_cap == [None, None]
    # A fraction is one of the smaller side, and the factor rounds up.
    growth = lro.RankGrowth(residual=0.1, window=1, factor=1.2, cap=0.5)
    assert ranks(growth(next(states(tx(), trees)), 0))["a"] == 3


def test_principal_angle_between_successive_bases():
    growth = lro.RankGrowth(residual=None, angle=20.0, cooldown=0)
    still, turned = gradients(2, seed=0), gradients(2, seed=1)
    trees = [still, still, still, still, turned, turned, turned]  # refreshed at 0, 3, 6
    trees = [t | {"s": still["s"]} for t in trees]
    seen = [ranks(growth(s, i)) for i, s in enumerate(states(tx(metrics=False), trees))]
    assert seen == [None] * 6 + [{"a": 4, "s": 2}]


def test_the_angle_does_not_see_signs_or_order():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 9, 4)))[0]
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    assert principal_angle(basis, -basis @ turn) < 1e-3
    assert principal_angle(basis, basis[..., :2]) < 1e-3
    outside = np.linalg.svd(basis)[0][..., 4:8]
    assert principal_angle(basis, outside) == pytest.approx(90)


def test_the_table_keeps_views_and_sides_of_all_targets_in_any_wrapper():
    def make(targets):
        tracker = lro.refresh_basis(2, targets=targets)
        one = lro.galore_project(optax.sgd(0.1), tracker, metrics=True)
        labels = {"a": "x", "s": "y", "b": "z"}
        return optax.partition({"x": one, "y": one, "z": optax.sgd(0.1)}, labels)

    old = make(lambda path, leaf: STACK if path == "s" else lro.Target(2, 0, 1))
    state = next(states(old, [gradients(6)]))
    table = lro.RankGrowth(residual=0.1, window=1)(state, 1)
    assert ranks(table) == {"a": 4, "s": 2}
    new = make(table)
    grown = lro.migrate(state, old, new, PARAMS)
    assert jax.tree.structure(grown) == jax.tree.structure(new.init(PARAMS))
    shapes = [x.shape for x in jax.tree.leaves(grown) if x.ndim > 1]
    assert sorted(shapes) == [(2, 8, 2), (8, 4)]


def test_errors():
    with pytest.raises(ValueError, match="give residual or angle"):
        lro.RankGrowth(None)
    with pytest.raises(ValueError, match=r"residual=1.5 is a share"):
        lro.RankGrowth(1.5)
    with pytest.raises(ValueError, match=r"angle=120.0 is in degrees"):
        lro.RankGrowth(None, 120.0)
    with pytest.raises(ValueError, match=r"factor=1.0"):
        lro.RankGrowth(factor=1.0)
    with pytest.raises(ValueError, match=r"window=0"):
        lro.RankGrowth(window=0)
    with pytest.raises(ValueError, match="cap=0"):
        lro.RankGrowth(cap=0)
    with pytest.raises(ValueError, match="build the optimizer with metrics=True"):
        lro.RankGrowth()(tx(metrics=False).init(PARAMS), 0)
    with pytest.raises(ValueError, match="the state holds no tracker"):
        lro.RankGrowth()(optax.sgd(0.1).init(PARAMS), 0)


# Training over migrations


def teacher():
    """A network that learns another one's outputs: params and a loss of params and a seed."""

    def network(params, x):
        hidden = jnp.tanh(x @ params["mlp"]["kernel"])
        mixed = hidden + jnp.tanh(hidden @ params["attn"]["kernel"])
        return mixed @ params["lm_head"]["kernel"]

    shapes = {"mlp": (12, 24), "attn": (24, 24), "lm_head": (24, 16)}
    params, true = (
        {
            name: {"kernel": normal(seed + i, shape) / np.float32(shape[0] ** 0.5)}
            for i, (name, shape) in enumerate(shapes.items())
        }
        for seed in (0, 10)
    )

    def loss(params, key):
        x = jax.random.normal(key, (64, 12))
        return jnp.mean((network(params, x) - network(true, x)) ** 2)

    return params, loss


def inner():
    return relaxed(optax.adam(1e-2))


def low(targets, every=20):
    return lro.galore_project(inner(), lro.refresh_basis(every=every, targets=targets))


HEAD = lro.Target(4, 0, 1)
ALL = [("mlp", 4), ("attn", 4), ("lm_head", HEAD)]
# Progressive enabling: feed-forward layers, then attention, then the head.
STAGES = [ALL[:1], ALL[:2], ALL]
PATHS = {
    "into the subspace": (inner(), [low(ALL)]),
    "out of it": (low(ALL), [inner()]),
    "larger rank": (low(ALL), [low([("mlp", 8), ("attn", 12), ("lm_head", lro.Target(8, 0, 1))])]),
    "progressive": (low(STAGES[0]), [low(s) for s in STAGES[1:]]),
}


def trainer(optimizer, loss, steps):
    """A compiled run from a given step on, and the loss on fixed data after each step."""
    fixed = jax.random.split(jax.random.key(99), 16)

    @jax.jit
    def run(params, state, start):
        def step(carry, i):
            params, state = carry
            gradient = jax.grad(loss)(params, jax.random.fold_in(jax.random.key(0), i))
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), jnp.mean(jax.vmap(lambda key: loss(params, key))(fixed))

        return jax.lax.scan(step, (params, state), start + jnp.arange(steps))

    return run


@pytest.mark.parametrize("name", PATHS)
def test_training_goes_on_without_a_spike(name):
    """The loss on fixed data stays where it was, which it does not from a fresh state."""
    old, others = PATHS[name]
    params, loss = teacher()
    (params, state), losses = trainer(old, loss, 300)(params, old.init(params), 0)
    for stage, new in enumerate(others):
        before, start = losses[-1], 300 + 40 * stage
        run = trainer(new, loss, 40)
        _, fresh = run(params, new.init(params), start)
        (params, state), losses = run(params, lro.migrate(state, old, new, params), start)
        assert max(losses[:10]) < 1.045 * before
        assert losses[-1] < before
        assert max(fresh[:10]) > 1.045 * before
        old = new
