"""What the comparisons share: gradients that move, and a runner that keeps every step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro

# Refreshes at 0, 200 and 400.
STEPS, EVERY, RANK = 450, 200, 4
SHAPES = {"tall": (40, 16), "wide": (16, 40), "square": (24, 24)}


@pytest.fixture(autouse=True)
def _their_promotion():
    # optax's own bias correction raises a float to an int32, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


def moving_gradients(shape: tuple[int, int], steps: int, seed: int) -> np.ndarray:
    """``(steps, m, n)`` gradients whose singular subspaces and values change slowly.

    The leading singular values stay apart, so that each singular vector, and not only the
    subspace, is well determined: Adam looks at coordinates.
    """
    rng = np.random.default_rng(seed)
    size = min(shape)
    left, right = (rng.standard_normal((2, side, size)) for side in shape)
    values = np.concatenate([[1.0, 0.8, 0.6, 0.4], 0.1 * 0.7 ** np.arange(size - 4)])
    phases = rng.uniform(0, 2 * np.pi, size)

    def frame(parts: np.ndarray, t: int) -> np.ndarray:
        return np.linalg.qr(parts[0] + 0.6 * np.sin(t / 90) * parts[1])[0]

    return np.stack(
        [
            (frame(left, t) * values * (1 + 0.05 * np.sin(t / 7 + phases))) @ frame(right, t).T
            for t in range(steps)
        ]
    ).astype(np.float32)


@pytest.fixture(scope="session")
def gradients() -> dict[str, np.ndarray]:
    """450 gradients of each of :data:`SHAPES`. Never write to them."""
    return {
        name: moving_gradients(shape, STEPS, seed)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


class Run:
    """Every step of one optimizer on given gradients.

    Attributes:
        params: the params after each step, stacked.
        bases: likewise the bases, by leaf name; those of the last tracker found.
        state: the last optimizer state.
    """

    def __init__(self, params: Any, bases: dict[str, np.ndarray], state: Any):
        self.params, self.bases, self.state = params, bases, state


def run_optimizer(tx: optax.GradientTransformation, start: Any, grads: Any) -> Run:
    """Applies ``tx`` to each gradient in turn, in one compiled scan."""

    def bases_of(state: Any) -> dict[str, jax.Array]:
        is_tracker = lambda node: isinstance(node, lro.TrackerState)  # noqa: E731
        found = {}
        for tracker in jax.tree.leaves(state, is_leaf=is_tracker):
            if is_tracker(tracker):
                for basis in (tracker.reduction_basis, tracker.output_basis):
                    pairs = jax.tree_util.tree_leaves_with_path(basis)
                    found |= {path[-1].key: leaf for path, leaf in pairs}
        return found

    @jax.jit
    def run(params, grads):
        def step(carry, grad):
            params, state = carry
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, bases_of(state))

        return jax.lax.scan(step, (params, tx.init(params)), grads)

    (_, state), (params, bases) = run(start, jax.tree.map(jnp.asarray, grads))
    return Run(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, bases), state)


@pytest.fixture(scope="session")
def run() -> Callable[..., Run]:
    """:func:`run_optimizer`, for tests."""
    return run_optimizer


def worst_deviation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest relative distance in norm between two trajectories, over all steps."""
    distance = np.linalg.norm((ours - theirs).reshape(len(ours), -1), axis=1)
    return float(np.max(distance / np.linalg.norm(theirs.reshape(len(ours), -1), axis=1)))


@pytest.fixture(scope="session")
def deviation() -> Callable[[np.ndarray, np.ndarray], float]:
    """:func:`worst_deviation`, for tests."""
    return worst_deviation
