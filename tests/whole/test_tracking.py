"""Whether trackers track: gradients from a subspace that slowly rotates, under noise."""

import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_optax as lro
from tests.helpers.loops import track

ROWS, COLUMNS, RANK, STEPS = 24, 40, 4, 240
# Radians a step of the fastest rotating plane, and the noise's share of the signal's norm.
SPEED, NOISE = 0.02, 0.05
# What an optimizer sees of a start from nothing.
WARM = 50


def rotating():
    """Gradients of all steps, ``(steps, m, n)``."""
    rng = np.random.default_rng(0)
    turn = rng.normal(size=(ROWS, ROWS))
    values, vectors = np.linalg.eigh(1j * (turn - turn.T))
    step = np.exp(-1j * SPEED * values / np.abs(values).max())
    subspace = np.linalg.qr(rng.normal(size=(ROWS, RANK)))[0]
    gradients = []
    for t in range(STEPS):
        now = np.real(vectors * step**t @ vectors.conj().T) @ subspace
        signal = now @ rng.normal(size=(RANK, COLUMNS))
        noise = rng.normal(size=signal.shape)
        gradients.append(signal + NOISE * np.linalg.norm(signal) / np.linalg.norm(noise) * noise)
    return np.stack(gradients)


GRADIENTS = rotating()


def norm(x):
    return np.linalg.norm(x, axis=(1, 2))


def best():
    squares = np.linalg.svd(GRADIENTS, compute_uv=False) ** 2
    return np.sqrt(squares[:, RANK:].sum(1) / squares.sum(1))


def distortion(tracker):
    """Of each step's gradient, with the matrices that the tracker then has."""
    like = {"w": jnp.zeros((ROWS, COLUMNS))}
    states = track(tracker, like, {"w": jnp.asarray(GRADIENTS, jnp.float32)})
    encoder = np.asarray(states.reduction_basis["w"][1:], np.float64)
    decoder = encoder
    if states.reduction_decoder is not None:
        decoder = np.asarray(states.reduction_decoder["w"][1:], np.float64)
    lost = GRADIENTS - decoder @ (np.swapaxes(encoder, 1, 2) @ GRADIENTS)
    return (norm(lost) / norm(GRADIENTS))[WARM:]


BEST = best()[WARM:]


def excess(tracker):
    """The mean and the largest ratio to the least distortion that rank r allows."""
    ratio = distortion(tracker) / BEST
    return ratio.mean(), ratio.max()


def test_a_frozen_basis_loses():
    frozen = distortion(lro.refresh_basis(RANK, method="frozen"))
    assert frozen.mean() > 10 * BEST.mean()
    # In the end it sees next to nothing.
    assert frozen[-50:].mean() > 0.8


def test_learn_basis_stays_near_the_best():
    mean, worst = excess(lro.learn_basis(RANK))
    assert mean < 1.05
    assert worst < 1.2


@pytest.mark.parametrize(
    ("every", "low", "high"), [(1, 1.0, 1.05), (10, 1.5, 3.0), (50, 5.0, 12.0)]
)
def test_refresh_basis_is_as_good_as_its_interval_is_short(every, low, high):
    mean, worst = excess(lro.refresh_basis(RANK, every))
    assert low <= mean < high
    if every == 1:
        assert worst < 1.2


def test_a_hundredth_of_a_main_learning_rate_is_a_frozen_basis():
    frozen = distortion(lro.refresh_basis(RANK, method="frozen"))
    learned = distortion(lro.learn_basis(RANK, learning_rate=1e-3 / 100))
    assert learned.mean() > 0.99 * frozen.mean()


def test_an_untied_encoder_follows_at_a_distance():
    mean, worst = excess(lro.learn_basis(RANK, tied=False))
    assert 1.2 < mean < 3.0
    assert worst < 4.0
