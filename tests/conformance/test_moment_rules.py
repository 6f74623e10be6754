"""Published rules for moments at a refresh, transcribed to NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro

B1, B2, RANK, EVERY = 0.9, 0.999, 4, 30


def on_sides(matrix, core, reduction, output):
    """``matrix`` applied to each side of a core that has a basis: R C, C Rᵀ or R C Rᵀ."""
    if reduction is not None:
        core = matrix(reduction) @ core
    if output is not None:
        core = core @ matrix(output).T
    return core


def ldadam_rule(first, second, count, rotations):
    """LDAdam's rotation: |R∘R (v̂ − m̂²) + (R m̂)²|, and R m; bias corrections put back."""
    mean, square = first / (1 - B1**count), second / (1 - B2**count)
    moved_mean = on_sides(lambda r: r, mean, *rotations)
    variance = on_sides(lambda r: r**2, square - mean**2, *rotations)
    moved_square = np.abs(variance + moved_mean**2)
    return moved_mean * (1 - B1**count), moved_square * (1 - B2**count)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


class Refresh:
    """What one leaf's moments were before and after an update that refreshed its basis."""

    def __init__(self, name, gradient, before, after):
        gradient = wide(gradient)
        self.old, self.new = self.bases(before, name), self.bases(after, name)
        pairs = zip(self.new, self.old, strict=True)
        self.rotations = [None if new is None else new.T @ old for new, old in pairs]
        adam, moved = before.inner_state, after.inner_state
        self.count = int(adam.count)
        self.first, self.second = wide(adam.mu[name]), wide(adam.nu[name])
        # Undo the step's own average, to see the moments just after they were carried.
        core = self.encode(self.new, gradient)
        self.carried_first = (wide(moved.mu[name]) - (1 - B1) * core) / B1
        self.carried_second = (wide(moved.nu[name]) - (1 - B2) * core**2) / B2

    @staticmethod
    def bases(state, name):
        tracker = state.tracker_state
        both = tracker.reduction_basis[name], tracker.output_basis[name]
        return [None if isinstance(b, optax.MaskedNode) else wide(b) for b in both]

    @staticmethod
    def encode(bases, full):
        left, right = bases
        core = full if left is None else left.T @ full
        return core if right is None else core @ right

    @staticmethod
    def lift(bases, core):
        left, right = bases
        full = core if left is None else left @ core
        return full if right is None else full @ right.T


@pytest.fixture(scope="module", params=["smaller", "larger", "both"])
def side(request):
    return request.param


@pytest.fixture(scope="module", params=["svd", "random"])
def refreshes(request, side, gradients):
    """The first refresh after the start, leaf by leaf."""
    tracker = lro.refresh_basis(RANK, EVERY, method=request.param, side=side)
    tx = lro.galore_project(optax.scale_by_adam(B1, B2), tracker)
    update = jax.jit(tx.update)
    after = tx.init({name: jnp.zeros(x.shape[1:]) for name, x in gradients.items()})
    with jax.numpy_dtype_promotion("standard"):  # for optax, and before its own fixture
        for step in range(EVERY + 1):
            before = after
            grads = {name: jnp.asarray(x[step]) for name, x in gradients.items()}
            _, after = update(grads, before)
    return {name: Refresh(name, x[EVERY], before, after) for name, x in gradients.items()}


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_rotation_follows_ldadam(refreshes):
    for name, refresh in refreshes.items():
        first, second = ldadam_rule(refresh.first, refresh.second, refresh.count, refresh.rotations)
        assert refresh.count == EVERY
        assert distance(refresh.carried_first, first) < 1e-5, name
        # The library sees b2 in float32, hence 1 - b2**30 to four digits.
        assert distance(refresh.carried_second, second) < 1e-5, name
        # The bases did move, so that this can fail.
        assert distance(refresh.first, first) > 1e-2, name
        assert distance(refresh.second, second) > 1e-2, name


def test_momentum_survives_a_refresh(refreshes):
    """Decoded after the refresh, it is what could be kept of the one before it.

    Flora re-encodes the momentum with the old projection and then changes the projection, so
    that what it decodes is noise.
    """
    for name, refresh in refreshes.items():
        before = refresh.lift(refresh.old, refresh.first)
        kept = refresh.lift(refresh.new, refresh.encode(refresh.new, before))
        after = refresh.lift(refresh.new, refresh.carried_first)
        cosine = np.sum(kept * after) / np.linalg.norm(kept) / np.linalg.norm(after)
        assert cosine > 1 - 1e-6, name
        np.testing.assert_allclose(np.linalg.norm(after), np.linalg.norm(kept), rtol=1e-5)
