"""What stands between encoder and decoder, as kernels on cores."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_optax._plan.view import make_view
from lowrank_optax._subspace import nonlinearity
from tests.helpers.data import normal

VIEW, STACK = make_view((6, 10), 0, 1), make_view((3, 6, 10), 1, 2)
ROWS = ("reduction",)
# Channels of very different size, as a gradient's are.
CORE = normal(0, (2, 10)) * jnp.asarray([[100.0], [0.1]])


@pytest.mark.parametrize(
    ("view", "sides", "core", "channels"),
    [
        (VIEW, ROWS, CORE, (1,)),
        (VIEW, ("output",), CORE.T[:6], (0,)),
        (VIEW, ("reduction", "output"), CORE[:, :2], (1,)),
        (STACK, ROWS, jnp.stack([CORE, 3 * CORE, CORE[::-1]]), (2,)),
        (STACK, ("output",), jnp.stack([CORE.T[:6]] * 3), (1,)),
    ],
    ids=["rows", "columns", "both", "stack", "stack_columns"],
)
def test_soft_clip_against_its_formula(view, sides, core, channels):
    x = np.asarray(core, np.float64)
    s = 3 * np.sqrt(np.mean(x**2, axis=channels, keepdims=True))
    got = np.asarray(nonlinearity.soft_clip(view, sides, core))
    np.testing.assert_allclose(got, s * np.tanh(x / s), rtol=1e-4)
    # Odd, and no larger than what it clips.
    np.testing.assert_allclose(nonlinearity.soft_clip(view, sides, -core), -got, rtol=1e-6)
    assert (np.abs(got) <= np.abs(x) * (1 + 1e-6)).all()


def test_soft_clip_of_nothing_and_of_an_outlier():
    assert not np.any(nonlinearity.soft_clip(VIEW, ROWS, jnp.zeros((2, 10))))
    spiked = jnp.ones((2, 1000)).at[0, 3].set(1e4)
    got = np.asarray(nonlinearity.soft_clip(make_view((6, 1000), 0, 1), ROWS, spiked))
    # 3 x RMS, and the RMS of the channel is 1e4 / sqrt(1000) here.
    assert got[0, 3] == pytest.approx(3e4 / 1000**0.5, rel=1e-3)
    assert got[1].min() > 0.95


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_units_do_not_matter(scale):
    gradient = normal(1, (6, 10))
    core = gradient[:2]
    for fn in (nonlinearity.soft_clip, nonlinearity.wiener):
        unit = np.asarray(fn(VIEW, ROWS, core, gradient))
        scaled = fn(VIEW, ROWS, jnp.float32(scale) * core, jnp.float32(scale) * gradient)
        np.testing.assert_allclose(scaled, scale * unit, rtol=1e-4)


def test_wiener_gates_each_channel_by_its_snr():
    gradient = normal(1, (3, 6, 10)) * jnp.asarray([5.0, 2.0, 1, 1, 1, 1])[:, None]
    core = gradient[:, :2]
    g, c = np.asarray(gradient, np.float64), np.asarray(core, np.float64)
    noise = np.mean(g[:, 2:] ** 2, axis=(1, 2), keepdims=True)
    power = np.mean(c**2, axis=2, keepdims=True)
    snr = np.maximum(power - noise, 1e-30) / noise
    expected = c / (1 + np.exp(-np.log(snr)))
    got = np.asarray(nonlinearity.wiener(STACK, ROWS, core, gradient))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    gates = got[:, :, 0] / c[:, :, 0]
    assert (gates[:, 0] > 0.9).all()
    assert (gates[:, 1] < gates[:, 0]).all()


def test_wiener_passes_what_has_no_noise_and_stops_what_is_noise():
    clean = jnp.zeros((6, 10)).at[:2].set(normal(2, (2, 10)))
    np.testing.assert_allclose(
        nonlinearity.wiener(VIEW, ROWS, clean[:2], clean), clean[:2], rtol=1e-4
    )
    noise = jnp.ones((6, 10))
    assert not np.any(nonlinearity.wiener(VIEW, ROWS, 0.5 * noise[:2], noise))
    zero = jnp.zeros((6, 10))
    assert not np.any(nonlinearity.wiener(VIEW, ROWS, zero[:2], zero))


def test_sigmoid_forgets_signs_and_makes_something_of_nothing():
    got = np.asarray(nonlinearity.sigmoid(VIEW, ROWS, jnp.asarray([[-50.0, 0.0, 50.0]])))
    np.testing.assert_allclose(got, [[0, 0.5, 1]], atol=1e-6)
