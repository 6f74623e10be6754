"""Computations that same-shape leaves share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_optax as lro
from lowrank_optax._arrays.sharing import map_sharing


def affine(static, x, tree):
    return {"y": static * x + tree["b"], "sum": jnp.sum(x)}


def calls_of(shapes, statics):
    rng = np.random.default_rng(0)
    return [
        (static, (jnp.float32(rng.normal(size=shape)), {"b": jnp.float32(rng.normal())}))
        for shape, static in zip(shapes, statics, strict=True)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_map_sharing_is_a_plain_loop(compiled):
    shapes = [(2, 3), (3, 2), (2, 3), (2, 3), (3, 2), (4,), (2, 3)]
    statics = [1, 1, 1, 2, 1, 1, 1]
    calls = calls_of(shapes, statics)

    def shared(arguments):
        return map_sharing(affine, list(zip(statics, arguments, strict=True)))

    results = (jax.jit(shared) if compiled else shared)([arguments for _, arguments in calls])
    for (static, arguments), result in zip(calls, results, strict=True):
        expected = affine(static, *arguments)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), result, expected)


def test_map_sharing_tells_dtypes_and_structures_apart():
    def double(static, x):
        return jax.tree.map(lambda x: x + x, x)

    calls = [
        (0, (jnp.ones(3),)),
        (0, (jnp.ones(3, jnp.bfloat16),)),
        (0, ([jnp.ones(3)],)),
        (0, (None,)),
    ]
    results = map_sharing(double, calls)
    assert results[0].dtype == jnp.float32
    assert results[1].dtype == jnp.bfloat16
    assert isinstance(results[2], list)
    assert results[3] is None


def test_map_sharing_of_nothing():
    assert map_sharing(affine, []) == []


def test_map_sharing_traces_once_a_group():
    traced = []

    def record(static, x):
        traced.append((static, x.shape))
        return x

    calls = [(0, (jnp.ones(2),))] * 5 + [(1, (jnp.ones(2),))] * 5 + [(0, (jnp.ones(3),))]
    map_sharing(record, calls)
    assert traced == [(0, (2,)), (1, (2,)), (0, (3,))]


@pytest.mark.parametrize("number", [16, 17, 50, 130, 260])
def test_each_turn_picks_its_own_arguments_however_many_there_are(number):
    calls = [(2, (jnp.float32(i), {"b": jnp.float32(10 * i)})) for i in range(number)]
    results = jax.jit(lambda: map_sharing(affine, calls))()
    assert [float(result["y"]) for result in results] == [12.0 * i for i in range(number)]


def test_what_a_trace_holds_grows_with_the_number_of_calls_and_not_with_its_square():
    """A switch whose branches all take all operands made 200 layers cost 16 times 50."""

    def operands(jaxpr):
        """Inputs of every jaxpr inside, which is what tracing makes."""
        total = len(jaxpr.invars)
        for eqn in jaxpr.eqns:
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    total += operands(getattr(value, "jaxpr", value))
        return total

    def is_jaxpr(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    def size(number):
        arguments = [(jnp.float32(i), {"b": jnp.float32(i)}) for i in range(number)]

        def shared(arguments):
            return map_sharing(affine, [(2, one) for one in arguments])

        return operands(jax.make_jaxpr(shared)(arguments).jaxpr)

    with jax.numpy_dtype_promotion("standard"):
        sizes = [size(number) for number in (50, 200)]
    assert sizes[1] < 8 * sizes[0]


def count_equations(jaxpr):
    """Equations of a jaxpr and of all that it holds."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += count_equations(inner)
    return total


@pytest.mark.parametrize("method", ["subspace", "gram"])
def test_a_refresh_grows_little_with_the_number_of_layers(method):
    """Layers of one shape share one refresh: what is left to grow is bookkeeping."""

    def size(layers):
        params = {f"layer_{i}": jnp.ones((16, 24)) for i in range(layers)}
        tracker = lro.refresh_basis(4, method=method)
        state = jax.eval_shape(tracker.init, params)
        jaxpr = jax.make_jaxpr(tracker.update)(params, state).jaxpr
        factorizations = str(jaxpr).count("eigh" if method == "gram" else "cholesky")
        return count_equations(jaxpr), factorizations

    (few, few_factorizations), (many, many_factorizations) = size(2), size(16)
    (one, _) = size(1)
    assert few_factorizations == many_factorizations > 0
    # Sixteen copies would be sixteen times as large as one.
    assert (many - few) / 14 < 0.2 * one
