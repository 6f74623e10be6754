"""Traced functions as lists of equations."""

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_optax._arrays.jaxpr import OnDemand, dependencies


def three(a, b, c):
    shared = jnp.sin(a)
    return shared + b, jnp.dot(b, b), shared * 2.0, c, jnp.float32(7.0)


def traced():
    x = jnp.arange(3.0)
    return jax.make_jaxpr(three)(x, x + 1, x + 2), (x, x + 1, x + 2)


def test_dependencies():
    closed, _ = traced()
    assert dependencies(closed) == [0b011, 0b010, 0b001, 0b100, 0]


def test_outputs_are_computed_when_asked_for():
    closed, inputs = traced()
    asked = []

    def input_of(number):
        def make():
            asked.append(number)
            return inputs[number]

        return make

    outputs = OnDemand(closed, [input_of(number) for number in range(3)])
    expected = three(*inputs)
    np.testing.assert_array_equal(outputs([1])[0], expected[1])
    assert asked == [1]
    np.testing.assert_allclose(outputs([2])[0], expected[2])
    assert asked == [1, 0]
    first, last = outputs([0, 4])
    np.testing.assert_allclose(first, expected[0])
    assert last == 7.0
    # Nothing is asked for twice, and the last input only now.
    np.testing.assert_array_equal(outputs([3])[0], expected[3])
    assert asked == [1, 0, 2]


def test_each_equation_runs_once():
    closed, inputs = traced()

    def one_by_one(*inputs):
        outputs = OnDemand(closed, [lambda x=x: x for x in inputs])
        return outputs([0]), outputs([2])

    assert str(jax.make_jaxpr(one_by_one)(*inputs)).count(" sin ") == 1


def test_what_only_prints_still_runs(capfd):
    def fn(x):
        jax.debug.print("seen {}", x)
        return x + 1

    closed = jax.make_jaxpr(fn)(1.0)
    (result,) = OnDemand(closed, [lambda: jnp.float32(1.0)])([0])
    jax.effects_barrier()
    assert result == 2.0
    assert "seen 1.0" in capfd.readouterr().out
