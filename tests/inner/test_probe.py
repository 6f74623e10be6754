import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowrank_optax._inner import probe
from tests.helpers.data import normal, random_like
from tests.helpers.loops import relaxed

CORES = {"w": normal(0, (2, 10)), "stack": normal(1, (3, 2, 4)), "bias": normal(2, (5,))}


def after_steps(inner, steps):
    inner = optax.with_extra_args_support(inner)
    state = inner.init(CORES)
    for step in range(steps):
        _, state = jax.jit(inner.update)(random_like(CORES, step), state, CORES)
    return inner, state


def test_probes_keep_structure_axes_and_dtype():
    cores = {"a": jnp.zeros((3, 4), jnp.bfloat16), "none": None, "masked": optax.MaskedNode()}
    made = probe.probes(cores, 0.5)
    assert jax.tree.structure(made) == jax.tree.structure(cores)
    assert made["a"].shape == (1, 1)
    assert made["a"].dtype == jnp.bfloat16
    assert float(made["a"][0, 0]) == 0.5


WARMUP = optax.linear_schedule(0.0, 0.4, 4)
NO_BIAS = {"w": True, "stack": True, "bias": False}


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (lambda: optax.adamw(0.1, weight_decay=0.5), {"w": -0.05, "stack": -0.05, "bias": -0.05}),
        (
            lambda: optax.adamw(0.1, weight_decay=0.5, mask=NO_BIAS),
            {"w": -0.05, "stack": -0.05, "bias": 0.0},
        ),
        (
            lambda: optax.adamw(
                0.1, weight_decay=0.5, mask=lambda p: jax.tree.map(lambda x: x.ndim == 3, p)
            ),
            {"w": 0.0, "stack": -0.05, "bias": 0.0},
        ),
        # The schedules' clocks are those of the state: three steps have passed.
        (lambda: optax.adamw(WARMUP, weight_decay=0.5), dict.fromkeys(CORES, -0.15)),
        (lambda: optax.lion(0.1, weight_decay=0.5), dict.fromkeys(CORES, -0.05)),
        (lambda: optax.adam(0.1), dict.fromkeys(CORES, 0.0)),
        (lambda: optax.sgd(0.1, momentum=0.9), dict.fromkeys(CORES, 0.0)),
        (
            lambda: optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)),
            dict.fromkeys(CORES, -0.05),
        ),
        (
            lambda: optax.partition(
                {"a": optax.adamw(0.1, weight_decay=0.5), "b": optax.sgd(0.1)},
                {"w": "a", "stack": "b", "bias": "b"},
            ),
            {"w": -0.05, "stack": 0.0, "bias": 0.0},
        ),
    ],
    ids=["adamw", "mask", "by_ndim", "schedule", "lion", "adam", "sgd", "chain", "partition"],
)
def test_decay_coefficients(inner, expected):
    inner, state = after_steps(relaxed(inner()), 3)
    coefficients = probe.decay_coefficients(inner, state, CORES, {})
    assert jax.tree.structure(coefficients) == jax.tree.structure(CORES)
    for name, value in expected.items():
        assert float(coefficients[name].reshape(())) == pytest.approx(value, abs=1e-7), name


def test_momentum_does_not_leak_into_decay_coefficients():
    inner, state = after_steps(relaxed(optax.adamw(0.1, weight_decay=0.5)), 5)
    assert np.abs(np.asarray(optax.tree.get(state, "mu")["bias"])).max() > 0
    coefficients = probe.decay_coefficients(inner, state, CORES, {})
    assert float(coefficients["bias"][0]) == pytest.approx(-0.05, abs=1e-7)


def test_one_element_leaves_have_no_history_in_a_probe_either():
    """A leaf of the probe's own shape must not bring its moments along."""
    cores = {"w": normal(0, (2, 10)), "scalar": jnp.ones((1,))}
    inner = optax.with_extra_args_support(relaxed(optax.adamw(0.1, weight_decay=0.5)))
    state = inner.init(cores)
    for _ in range(3):
        _, state = inner.update(cores, state, cores)
    coefficients = probe.decay_coefficients(inner, state, cores, {})
    assert float(coefficients["scalar"][0]) == pytest.approx(-0.05, abs=1e-7)


@pytest.mark.parametrize(
    ("inner", "reads"),
    [
        (lambda: optax.adam(0.1), False),
        (lambda: optax.adamw(0.1, weight_decay=0.1), True),
        (lambda: optax.sgd(0.1, 0.9), False),
        (lambda: optax.lamb(0.1), True),
        (lambda: optax.chain(optax.clip(1.0), optax.adafactor(0.1)), True),
        (lambda: optax.adafactor(0.1, multiply_by_parameter_scale=False), False),
    ],
    ids=["adam", "adamw", "sgd", "lamb", "adafactor", "adafactor_unscaled"],
)
def test_reads_params(inner, reads):
    inner, state = after_steps(relaxed(inner()), 0)
    assert probe.reads_params(inner, state, CORES, {}) == reads
    # Under a trace too, where cores and state are tracers.
    seen = []
    jax.jit(lambda c, s: seen.append(probe.reads_params(inner, s, c, {})))(CORES, state)
    assert seen == [reads]


@pytest.mark.parametrize(
    ("inner", "fields"),
    [
        (lambda: optax.adam(0.1, 0.7, 0.97), {"mu": 0.7, "nu": 0.97}),
        (lambda: optax.sgd(0.1, momentum=0.6), {"trace": 0.6}),
        (
            lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1, b1=0.7, b2=0.97),
            {"mu": 0.7, "nu": 0.97},
        ),
        (lambda: optax.masked(optax.adam(0.1, 0.7, 0.97), NO_BIAS), {"mu": 0.7, "nu": 0.97}),
    ],
    ids=["adam", "sgd", "injected", "masked"],
)
def test_decay_rates(inner, fields):
    inner, state = after_steps(relaxed(inner()), 3)
    one, two = probe.decay_rates(inner, state, CORES, {})
    assert jax.tree.structure(one) == jax.tree.structure(state)
    for field, rate in fields.items():
        first, second = (optax.tree.get(s, field)["w"] for s in (one, two))
        assert first.shape == (1, 1)
        np.testing.assert_allclose(second / first, 1 + rate, rtol=1e-5)


def test_extra_arguments_reach_a_probed_optimizer():
    def update(updates, state, params=None, *, factor, **extra):
        del extra
        return jax.tree.map(lambda u, p: u - factor * p, updates, params), state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    coefficients = probe.decay_coefficients(inner, optax.EmptyState(), CORES, {"factor": 0.25})
    assert float(coefficients["w"][0, 0]) == -0.25
    assert probe.reads_params(inner, optax.EmptyState(), CORES, {"factor": 0.25})
