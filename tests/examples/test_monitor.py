import jax
import jax.numpy as jnp
import optax
import pytest

import lowrank_optax as lro
import monitor
from tests.helpers.data import normal


@pytest.fixture(scope="module")
def opt_state():
    """One leaf that a rank of 2 holds, and one that it does not."""
    params = {"good": normal(0, (6, 2)) @ normal(1, (2, 10)), "poor": normal(2, (6, 10))}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2), metrics=True)
    return tx.update(params, tx.init(params), params)[1]


FINE = monitor.Thresholds(0.1, 0.1, 1.2, 0.9)


def test_nothing_to_complain_about(opt_state):
    assert monitor.complaints(opt_state, FINE) == []
    empty = lro.galore_project(None, lro.refresh_basis(2), metrics=True)
    assert monitor.complaints(empty.init({"w": jnp.ones((6, 10))}), FINE) == []


@pytest.mark.parametrize(
    ("thresholds", "sentence"),
    [
        (monitor.Thresholds(50.0, 0.1, 1.2, 0.9), "poor: effective_snr is .*, below 50"),
        (monitor.Thresholds(0.1, 0.99, 1.2, 0.9), "poor: grad_norm_ratio is .*, below 0.99"),
        (monitor.Thresholds(0.1, 0.1, 0.5, 0.9), "good: grad_norm_ratio is 1, above 0.5"),
        (monitor.Thresholds(0.1, 0.1, 1.2, 0.01), "poor: sign_flip_rate is .*, above 0.01"),
    ],
)
def test_names_the_worst_leaf_and_the_threshold(opt_state, thresholds, sentence):
    (only,) = monitor.complaints(opt_state, thresholds)
    with pytest.warns(UserWarning, match=f"step 20: {sentence}"):
        monitor.Monitor(thresholds, every=10)(20, opt_state)
    assert only.startswith(sentence.split(":")[0])
    # Not a step at which it looks.
    monitor.Monitor(thresholds, every=10)(21, opt_state)


@pytest.fixture
def _usual_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("_usual_promotion")
def test_the_script(capsys):
    arguments = ["--steps", "20", "--every", "20", "--width", "16", "--rank", "2"]
    loss = monitor.main([*arguments, "--min-snr", "50"])
    printed = capsys.readouterr().out
    assert "effective_snr is" in printed
    assert "step 20: " in printed
    assert f"loss {loss:.4f}" in printed
    monitor.main([*arguments, "--min-snr", "0", "--min-norm-ratio", "0", "--max-sign-flips", "1"])
    assert "step 20: " not in capsys.readouterr().out
