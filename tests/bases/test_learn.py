import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import assert_orthonormal, avals, basis_matrices, swap, unchecked
from tests.helpers.data import LAYOUTS, at, layout, normal, random_like, sequence
from tests.helpers.loops import relaxed, track

TWO = {"a": jnp.zeros((6, 10)), "bias": jnp.zeros(10), "w": jnp.zeros((10, 6))}
BOTH = (("^(a|w)$", 2),)
GRADIENTS = sequence(TWO, 6)
# One object for equal options, so that tests share what is compiled.
make = functools.cache(lro.learn_basis)


def by_hand(gradients, start, eta):
    """Bases after each step of Oja's descent, damped, for a matrix that is projected by rows."""
    p, bases = start, []
    for g in np.asarray(gradients, np.float64):
        s = g @ g.T / np.sum(g**2)
        m = p.T @ s @ p
        p = p + 2 * eta * (s @ p - p @ m) @ np.linalg.inv(np.eye(len(m)) + 2 * eta * m)
        p = np.linalg.qr(p)[0]
        bases.append(p)
    return bases


@pytest.mark.parametrize("path", ["a", "w"])
def test_learns_by_ojas_descent(path):
    states = track(make(targets=BOTH, init="random", learning_rate=3.0), TWO, GRADIENTS)

    def side(step):
        return next(b for b in basis_matrices(at(states, step), path) if b is not None)[0]

    gradients = GRADIENTS[path] if path == "a" else swap(np.asarray(GRADIENTS[path]))
    for step, expected in enumerate(by_hand(gradients, side(0), 3.0), start=1):
        got = side(step)
        np.testing.assert_allclose(got @ got.T, expected @ expected.T, atol=1e-4)
    assert states.refreshes.tolist() == [[t, t] for t in range(7)]
    assert states.next_refresh.tolist() == [[t, t] for t in range(7)]


def test_starts_at_the_first_gradients_subspace():
    states = track(make(targets=BOTH), TWO, GRADIENTS)
    g = np.asarray(GRADIENTS["a"][0], np.float64)
    (p,) = basis_matrices(at(states, 1), "a")[0]
    best = np.linalg.svd(g)[1]
    assert np.sum((p.T @ g) ** 2) > 0.98 * np.sum(best[:2] ** 2)
    assert states.refreshes[1].tolist() == [1, 1]


def test_learns_every_so_many_steps():
    states = track(make(targets=BOTH, every=3), TWO, GRADIENTS)
    changed = [
        not np.array_equal(states.reduction_basis["a"][t], states.reduction_basis["a"][t + 1])
        for t in range(6)
    ]
    assert changed == [True, False, False, True, False, False]
    assert np.diff(states.refreshes[:, 0]).tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("every", [1, 3])
def test_what_cannot_teach_leaves_the_basis_and_is_tried_again(bad, every):
    # The first gradient and a later one are bad, one leaf at a time.
    spoiled = dict(GRADIENTS)
    spoiled["a"] = GRADIENTS["a"].at[0].set(bad).at[3].set(bad)
    states = track(make(targets=BOTH, every=every), TWO, spoiled)
    for tree, path in ((states.reduction_basis, "a"), (states.output_basis, "w")):
        assert np.isfinite(tree[path]).all()
        assert_orthonormal(np.asarray(tree[path], np.float64))
    learned = np.diff(states.refreshes, axis=0)
    assert learned[:, 1].tolist() == ([1] * 6 if every == 1 else [1, 0, 0, 1, 0, 0])
    assert learned[:, 0].tolist() == ([0, 1, 1, 0, 1, 1] if every == 1 else [0, 1, 0, 0, 1, 0])
    for step in np.flatnonzero(learned[:, 0] == 0):
        a = states.reduction_basis["a"]
        np.testing.assert_array_equal(a[step], a[step + 1])
    # The leaf beside it does not notice.
    clean = track(make(targets=BOTH, every=every), TWO, GRADIENTS)
    np.testing.assert_array_equal(states.output_basis["w"], clean.output_basis["w"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_gradients_teach_as_fast_as_large_ones(dtype):
    tracker = make(targets=BOTH)
    # A power of two is exact in either dtype.
    large = jax.tree.map(lambda x: x.astype(dtype), GRADIENTS)
    small = jax.tree.map(lambda x: x * jnp.asarray(2.0**-17, dtype), large)
    for t in range(1, 7):
        first, second = (at(track(tracker, TWO, x), t) for x in (large, small))
        np.testing.assert_allclose(
            first.reduction_basis["a"], second.reduction_basis["a"], atol=1e-5
        )


# Layouts in which the sides differ in how they are found.
MIXED = {"tall": "larger", "square": "both", "out": "reduction", "stack_in_the_middle": "output"}


@pytest.mark.parametrize("tied", [True, False])
def test_layouts_and_sides_stay_orthonormal(tied):
    params = {name: jnp.zeros(LAYOUTS[name][0]) for name in MIXED}
    targets = {name: layout(name, side)[1] for name, side in MIXED.items()}
    tracker = lro.learn_basis(targets=targets, tied=tied, init="random")
    states = track(tracker, params, sequence(params, 3))
    state = at(states, 3)
    assert avals(state) == avals(at(states, 0))
    assert (state.reduction_decoder is None) == tied
    lifting = (state.reduction_decoder, state.output_decoder)
    decoders = state._replace(reduction_basis=lifting[0], output_basis=lifting[1])
    for name, side in MIXED.items():
        for here in (state,) if tied else (state, decoders):
            found = [b for b in basis_matrices(here, name) if b is not None]
            assert len(found) == (2 if side == "both" else 1)
            for basis in found:
                assert_orthonormal(basis)


def test_an_untied_decoder_starts_as_the_encoder_and_leads_it():
    states = track(make(targets=BOTH, tied=False), TWO, GRADIENTS)
    for t in (0, 1):
        np.testing.assert_array_equal(
            states.reduction_basis["a"][t], states.reduction_decoder["a"][t]
        )
    assert not np.array_equal(states.reduction_basis["a"][2], states.reduction_decoder["a"][2])
    # After the second gradient the decoder is where a tied basis would be, the encoder is not.
    tied = track(make(targets=BOTH), TWO, GRADIENTS).reduction_basis["a"][2]
    np.testing.assert_allclose(states.reduction_decoder["a"][2], tied, atol=1e-5)
    cosine = np.linalg.svd(states.reduction_basis["a"][2].T @ tied, compute_uv=False).min()
    assert cosine < 0.999


def test_learning_rate_may_be_a_schedule():
    rate = lambda t: jnp.where(t < 2, 0.0, 5.0)  # noqa: E731
    states = track(lro.learn_basis(targets=BOTH, init="random", learning_rate=rate), TWO, GRADIENTS)
    a = states.reduction_basis["a"]
    np.testing.assert_allclose(a[2], a[0], atol=1e-5)
    assert np.abs(a[3] - a[2]).max() > 1e-2


def test_starts_from_captured_bases():
    wide = normal(7, (6, 4)), normal(8, (6, 3))
    captured = {"a": lro.Bases(reduction=wide[0]), "w": lro.Bases(output=wide[1])}
    state = make_from(captured).init(TWO)
    for path, basis, given in (("a", 0, wide[0]), ("w", 1, wide[1])):
        got = basis_matrices(state, path)[basis][0]
        assert_orthonormal(got[None])
        # The first two columns given, in their order.
        expected = np.linalg.qr(np.asarray(given, np.float64)[:, :2])[0]
        np.testing.assert_allclose(np.abs(expected.T @ got), np.eye(2), atol=1e-5)
    # The first step learns from there.
    _, after = make_from(captured).update(random_like(TWO, 3), state)
    moved = after.reduction_basis["a"].T @ state.reduction_basis["a"]
    assert 0.1 < np.linalg.svd(moved, compute_uv=False).min() < 0.9999


def make_from(captured):
    return lro.learn_basis(targets=BOTH, init=captured)


@pytest.mark.parametrize(
    ("captured", "message"),
    [
        ({}, "'a': init has no basis for its reduction side"),
        ({"a": lro.Bases(output=jnp.ones((10, 2)))}, "no basis for its reduction side"),
        ({"a": lro.Bases(reduction=jnp.ones((6, 1)))}, r"shape \(6, 1\).*expected shape \(6, 2\)"),
        ({"a": lro.Bases(reduction=jnp.ones((10, 2)))}, r"shape \(10, 2\).*activation_basis"),
    ],
)
def test_captured_bases_that_do_not_fit(captured, message):
    with pytest.raises(ValueError, match=message):
        make_from(captured).init(TWO)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "learn_basis: rank=0"),
        ({"every": 0}, ValueError, "every=0 must be at least 1"),
        ({"every": 1.5}, TypeError, "every must be an int"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate=-1.0 must be finite"),
        ({"learning_rate": float("nan")}, ValueError, "must be finite"),
        ({"learning_rate": "main/100"}, TypeError, r"schedule\(t\) / 100"),
        ({"init": "svd"}, ValueError, "init='svd'"),
        ({"side": "left"}, ValueError, "side='left'"),
        ({"dtype": jnp.int32}, ValueError, "learn_basis: dtype=int32"),
    ],
)
def test_constructor_errors(options, error, message):
    with pytest.raises(error, match=message):
        unchecked(lro.learn_basis)(**options)


def test_compact_gradients_are_refused_by_name():
    params = {"w": normal(0, (6, 10))}
    tx = lro.logra_sketch(optax.sgd(0.1), lro.learn_basis(2))
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(lambda p: jnp.sum(p["w"] ** 2))
    with pytest.raises(
        ValueError, match="learn_basis needs the full gradient, which here never exists"
    ):
        grad_fn(params, opt_state=state)
    with pytest.raises(ValueError, match="'w': learn_basis needs the full gradient"):
        tx.update({"w": lro.Compact(jnp.ones((2, 10)))}, state, params)


@pytest.mark.parametrize("tied", [True, False])
def test_wrapped_and_donated_and_its_state_mapped(tied):
    params = {"w": normal(0, (6, 10)), "none": None, "bias": jnp.ones(4)}
    inner = lro.logra_sketch(relaxed(optax.adam(0.1)), lro.learn_basis(2, tied=tied))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.apply_if_finite(inner, 2))
    state = tx.init(params)
    start = avals(state)
    step = jax.jit(tx.update, donate_argnums=1)
    for seed in range(2):
        _, state = step(random_like(params, seed), state, params)
    assert avals(state) == start
    mapped = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert optax.tree.get(mapped, "refreshes").tolist() == [2]
    assert jax.tree.leaves(lro.learn_basis(2, tied=tied).init({}))  # the counters


def test_describe_counts_the_decoder():
    params = {"w": jnp.zeros((16, 32))}
    row = lro.describe(lro.logra_sketch(optax.sgd(0.1), lro.learn_basis(4)), params).rows[0]
    untied = lro.logra_sketch(optax.sgd(0.1), lro.learn_basis(4, tied=False))
    assert lro.describe(untied, params).rows[0].state_bytes == 2 * row.state_bytes == 512


def test_a_learned_basis_may_watch_beside_compact_gradients_of_other_weights():
    params = {"a": normal(0, (6, 10)), "b": normal(1, (6, 10))}
    watch = lro.learn_basis(2, targets=[("a", 2)])
    tx = optax.chain(watch, relaxed(lro.galore_adamw(0.1, 2, targets=[("b", 2)])))
    state = tx.init(params)
    loss = lambda p: jnp.sum((p["a"] @ p["b"].T) ** 2)  # noqa: E731
    _, grads, bases = lro.compact_value_and_grad(loss)(params, opt_state=state)
    _, state = tx.update(grads, state, params, bases=bases)
    assert optax.tree.get(state[0], "refreshes").tolist() == [1]
