"""``optax.contrib.galore``, which projects the larger side and keeps moments."""

import numpy as np
import optax
import pytest

import lowrank_optax as lro

pytestmark = pytest.mark.skipif(
    not hasattr(optax.contrib, "galore"), reason="this optax has no optax.contrib.galore"
)

RATE, SCALE, RANK, EVERY = 0.01, 0.25, 4, 200


def contrib(**options):
    return optax.contrib.galore(RATE, rank=RANK, update_proj_gap=EVERY, scale=SCALE, **options)


def ours_with(targets=None, **options):
    return lro.galore_adamw(
        RATE,
        RANK,
        EVERY,
        SCALE,
        targets=targets,
        method="svd",
        side="larger",
        moments="keep",
        **options,
    )


@pytest.fixture
def start(gradients):
    """Beside the matrices a bias, which neither projects."""
    params = {name: np.zeros(x.shape[1:], np.float32) for name, x in gradients.items()}
    return params | {"bias": np.zeros(16, np.float32)}


@pytest.fixture
def grads(gradients):
    return gradients | {"bias": gradients["tall"][:, 3]}


def test_same_trajectory(start, grads, run, deviation):
    """Both take ``jnp.linalg.svd`` of the same matrix, so that even the signs agree."""
    ours, theirs = (run(tx, start, grads) for tx in (ours_with(), contrib()))
    projectors = theirs.state[0].projector
    for name in start:
        assert deviation(ours.params[name], theirs.params[name]) < 1e-5, name
    for name, basis in ours.bases.items():
        assert basis[-1].shape == projectors[name].shape == (max(start[name].shape), RANK)
        np.testing.assert_allclose(basis[-1], projectors[name], atol=1e-5)


def test_same_trajectory_with_decay(start, grads, run, deviation):
    """Its decay, after the projection, is what decay inside our inner optimizer does."""
    start = {name: x + 1 for name, x in start.items()}
    pair = ours_with(weight_decay=0.1), contrib(weight_decay=0.1)
    ours, theirs = (run(tx, start, grads) for tx in pair)
    for name in start:
        assert deviation(ours.params[name], theirs.params[name]) < 1e-5, name


def test_same_trajectory_of_an_attention_kernel(gradients, run, deviation):
    """Its dimension numbers are accepted as they are, for a leaf of three axes."""
    numbers = optax.contrib.GaLoreDimensionNumbers(reduction_axis=0, output_axis=(1, 2))
    grads = {"query": gradients["wide"].reshape(-1, 16, 5, 8)}
    start = {"query": np.zeros((16, 5, 8), np.float32)}
    ours = run(ours_with(targets={"query": numbers}), start, grads)
    theirs = run(contrib(weight_dimension_numbers=numbers), start, grads)
    assert ours.bases["query"].shape[1:] == (5, 8, RANK)
    assert deviation(ours.params["query"], theirs.params["query"]) < 1e-5
