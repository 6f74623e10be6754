"""Whose array is this: owners by the optimizer's own word, and by keys."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._inner.sites import kept_fields, mirrors, sites
from tests.helpers.data import normal, random_like
from tests.helpers.loops import relaxed

PARAMS = {"kernel": normal(0, (6, 10)), "layer": {"kernel": normal(1, (6, 10))}, "none": None}


def owners(tx, params=PARAMS, by_keys=False):
    """The weight, field and role of every array of a fresh state, by the array's name."""
    state = jax.eval_shape(tx.init, params)
    found = sites(state, mirrors(state, params, None if by_keys else tx))
    return {
        site.name: (site.weight, site.field, site.role) for site in found if site.value is not None
    }


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "chain": optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale(2.0)),
    "masked": optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "quantized": lro.quantized_moments(optax.adam(0.1)),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)},
        {"kernel": "a", "layer": {"kernel": "b"}, "none": None},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_ways_name_the_same_owners(name):
    asked, by_keys = (owners(OPTIMIZERS[name], by_keys=how) for how in (False, True))
    assert asked == by_keys
    weights = {weight for weight, _, _ in asked.values()}
    assert {"kernel", "layer/kernel"} <= weights


def test_the_owner_is_the_whole_path_and_not_an_ending_of_it():
    found = owners(optax.adam(0.1))
    assert found["0/mu/kernel"] == ("kernel", "mu", "first")
    assert found["0/nu/layer/kernel"] == ("layer/kernel", "nu", "second")
    assert found["0/count"] == (None, "count", None)


def test_weights_with_the_names_of_fields():
    params = {"mu": normal(0, (6, 10)), "count": normal(1, (3,)), "nu": {"mu": normal(2, (4, 5))}}
    for by_keys in (False, True):
        found = owners(optax.adam(0.1), params, by_keys)
        assert found["0/mu/mu"] == ("mu", "mu", "first")
        assert found["0/nu/nu/mu"] == ("nu/mu", "nu", "second")
        assert found["0/mu/count"] == ("count", "mu", "first")
        assert found["0/count"] == (None, "count", None)


def test_params_that_are_one_array():
    assert owners(optax.adam(0.1), normal(0, (6, 10)))["0/mu"] == ("", "mu", "first")


def test_an_optimizer_that_looks_at_its_leaves_is_seen_by_keys():
    def init(params):
        return optax.TraceState({"first": jax.tree.leaves(params)[0], "all": params})

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    found = owners(tx)
    assert found["trace/all/layer/kernel"] == ("layer/kernel", "trace", "first")
    assert found["trace/first"] == (None, "trace", None)


# A momentum whose state is of each kind that has named fields -------------------------------------


class Tuple(NamedTuple):
    mu: Any
    nu: Any
    other: Any


@flax.struct.dataclass
class Flax:
    mu: Any
    nu: Any
    other: Any


class Equinox(eqx.Module):
    mu: Any
    nu: Any
    other: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    mu: Any
    nu: Any
    other: Any


def adam_with(kind):
    """Adam without bias correction, and a third average under a name that nobody knows."""

    def init(params):
        return kind(*(jax.tree.map(jnp.zeros_like, params) for _ in range(3)))

    def update(updates, state, params=None):
        def average(old, new):
            return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)

        squares = jax.tree.map(jnp.square, updates)
        state = kind(
            average(state.mu, updates), average(state.nu, squares), average(state.other, updates)
        )
        step = jax.tree.map(lambda m, v: -0.1 * m / (jnp.sqrt(v) + 1e-8), state.mu, state.nu)
        return step, state

    return relaxed(optax.GradientTransformation(init, update))


@pytest.mark.parametrize("kind", [Flax, Equinox, Registered], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("moments", ["rotate", "reset"])
def test_moments_in_a_dataclass_are_carried_as_in_a_named_tuple(kind, moments):
    """Update norms were 1.464, 1.469 as a NamedTuple and 1.547, 1.528 as a dataclass."""
    params = {"w": normal(0, (6, 10))}

    def updates(kind):
        tracker = lro.refresh_basis(2, 2, method="svd")
        tx = lro.galore_project(adam_with(kind), tracker, moments=moments)
        state, step = tx.init(params), jax.jit(tx.update)
        found = []
        for seed in range(5):
            update, state = step(random_like(params, seed), state, params)
            found.append(np.asarray(update["w"]))
        return found, state.inner_state

    left, first = updates(Tuple)
    right, second = updates(kind)
    np.testing.assert_allclose(left, right, rtol=1e-6)
    np.testing.assert_allclose(first.mu["w"], second.mu["w"], rtol=1e-6)
    kept, _ = updates(Tuple)
    assert np.isfinite(kept).all()


@pytest.mark.parametrize("kind", [Tuple, Flax, Equinox, Registered], ids=lambda kind: kind.__name__)
def test_describe_names_what_no_rule_carries(kind):
    params = {"w": normal(0, (6, 10))}
    tx = lro.galore_project(adam_with(kind), lro.refresh_basis(2))
    text = str(lro.describe(tx, params))
    assert f"{kind.__name__}.other: not recognised as moments" in text
    state = jax.eval_shape(adam_with(kind).init, params)
    assert kept_fields(sites(state, mirrors(state, params)), {"w"}) == [f"{kind.__name__}.other"]


def test_a_refresh_of_one_weight_resets_no_other_whose_path_ends_alike():
    """The reset of `kernel` reset `layer/kernel` too: its norm went from 0.842 to 0.508."""
    params = {k: PARAMS[k] for k in ("kernel", "layer")}
    tracker = lro.refresh_basis(2, 4, stagger=True, method="svd")
    tx = lro.galore_project(relaxed(optax.trace(0.9)), tracker, moments="reset")
    state, step = tx.init(params), jax.jit(tx.update)
    gradients = jax.tree.map(lambda x: x, params)
    refreshes = [np.asarray(state.tracker_state.refreshes)]
    norms = []
    for _ in range(5):
        _, state = step(gradients, state, params)
        refreshes.append(np.asarray(state.tracker_state.refreshes))
        norms.append(float(jnp.linalg.norm(state.inner_state.trace["layer"]["kernel"])))
    changed = np.diff(refreshes, axis=0)
    # At the fifth step `kernel` is refreshed and `layer/kernel`, which was at the third, is not.
    assert changed[4].tolist() == [1, 0]
    assert norms[4] > norms[3]


# Optimizers that keep their arrays elsewhere, and params of other forms ---------------------------


def test_error_feedback_finds_the_momentum_of_params_that_are_one_array():
    def errors(params):
        tx = relaxed(lro.ldadamw(1e-2, rank=4))
        state, step = tx.init(params), jax.jit(tx.update)
        for seed in range(3):
            _, state = step(random_like(params, seed), state, params)
        return jax.tree.leaves(state.feedback)

    weight = normal(0, (16, 24))
    alone, in_a_dict = errors(weight), errors({"": weight})
    np.testing.assert_allclose(alone[0], in_a_dict[0], rtol=1e-5)
    assert np.abs(alone[0]).sum() > 0


def test_moments_of_one_array_rotate_in_an_optimizer_that_cannot_be_asked():
    """By keys alone, params that are one array mirror nothing: no moment was carried over."""

    def init(params):
        return optax.TraceState(jnp.zeros_like(params))

    def update(updates, state, params=None):
        trace = 0.9 * state.trace + updates
        return trace, optax.TraceState(trace)

    asked, unasked = optax.trace(0.9), optax.GradientTransformation(init, update)

    def trace(inner):
        tx = lro.galore_project(relaxed(inner), lro.refresh_basis(2, 1, method="svd"))
        params = normal(0, (6, 10))
        state, step = tx.init(params), jax.jit(tx.update)
        for seed in range(3):
            _, state = step(random_like(params, seed), state, params)
        return state.inner_state.trace

    np.testing.assert_allclose(trace(unasked), trace(asked), rtol=1e-5)


class Moments(NamedTuple):
    m: Any
    v: Any


def by_weight():
    """An optimizer that keeps one NamedTuple of moments a weight."""

    def init(params):
        return optax.TraceState(jax.tree.map(lambda x: Moments(x * 0, x * 0), params))

    return optax.GradientTransformation(init, lambda g, s, p=None: (g, s))


@pytest.mark.parametrize("tx", [optax.sm3(0.1), by_weight()], ids=["sm3", "by weight"])
def test_several_arrays_of_a_weight_are_all_counted(tx):
    params = {"a": normal(0, (6, 10)), "b": {"c": normal(1, (6, 10))}}
    description = lro.describe(tx, params)
    real = sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))
    assert description.state_bytes == real
    assert description.rows[0].state_bytes == description.rows[1].state_bytes > 0


def test_moments_that_mirror_no_params_are_quantized_too():
    params = {"a": normal(0, (64, 128)), "b": normal(1, (64, 128))}
    for tx in (optax.flatten(optax.adam(1e-3)), by_weight()):
        whole, few = (
            sum(x.nbytes for x in jax.tree.leaves(made.init(params)))
            for made in (tx, lro.quantized_moments(tx))
        )
        assert few < 0.3 * whole


def test_a_field_may_hold_the_moments_of_a_weight_twice():
    """Two averages under one name: only the last was rotated."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.TraceState({"fast": zeros, "slow": zeros})

    def update(updates, state, params=None):
        trace = {
            name: jax.tree.map(lambda old, new, b=b: b * old + new, state.trace[name], updates)
            for name, b in (("fast", 0.5), ("slow", 0.9))
        }
        return trace["slow"], optax.TraceState(trace)

    params = {"w": normal(0, (6, 10))}

    def last(inner):
        tx = lro.galore_project(relaxed(inner), lro.refresh_basis(2, 1, method="svd"))
        state, step = tx.init(params), jax.jit(tx.update)
        for seed in range(3):
            _, state = step(random_like(params, seed), state, params)
        return state.inner_state.trace

    both = last(optax.GradientTransformation(init, update))
    for name, decay in (("fast", 0.5), ("slow", 0.9)):
        np.testing.assert_allclose(both[name]["w"], last(optax.trace(decay))["w"], rtol=1e-5)
