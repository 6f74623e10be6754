"""logra_sketch: sketches as a filter and around an optimizer, and what belongs around it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from tests.helpers.assertions import avals
from tests.helpers.data import at, normal, random_like, regression, sequence
from tests.helpers.loops import relaxed, run, train

PARAMS = {"w": normal(0, (6, 10)), "bias": normal(1, (4,))}
GRADIENTS = sequence(PARAMS, 4)
# From a random start, which compiles faster.
LEARNED = {"rank": 2, "learning_rate": 3.0, "init": "random"}


def matrices(state):
    """V and U of "w" in float64."""
    tracker = state.tracker_state
    v = np.asarray(tracker.reduction_basis["w"], np.float64)
    u = tracker.reduction_decoder
    return v, v if u is None else np.asarray(u["w"], np.float64)


def updates_of(tx, gradients=GRADIENTS, params=PARAMS):
    return run(tx, params, gradients, apply=False)[:2]


def test_the_default_is_galore_project_with_learned_bases():
    left, _ = updates_of(lro.logra_sketch(optax.sgd(0.1), lro.learn_basis(**LEARNED)))
    right, _ = updates_of(lro.galore_project(optax.sgd(0.1), lro.learn_basis(**LEARNED)))
    np.testing.assert_array_equal(left["w"], right["w"])
    params = {"w": jnp.zeros((40, 64))}
    state = lro.logra_sketch().init(params).tracker_state
    assert state.reduction_basis["w"].shape == (40, 32)
    assert state.plan.tracking.needs_gradient == "learn_basis"


@pytest.mark.parametrize("tied", [True, False])
def test_a_filter_outputs_the_sketch(tied):
    tx = lro.logra_sketch(basis=lro.learn_basis(**LEARNED, tied=tied), metrics=True)
    updates, states = updates_of(tx)
    for t in range(4):
        v, u = matrices(at(states, t + 1))
        g = np.asarray(GRADIENTS["w"][t], np.float64)
        np.testing.assert_allclose(updates["w"][t], u @ (v.T @ g), atol=1e-5)
        # The metrics compare what comes out with what came in.
        fidelity = lro.metrics(jax.tree.map(jnp.asarray, at(states, t + 1))).leaves["w"]
        out = np.asarray(updates["w"][t], np.float64)
        norm = np.linalg.norm
        assert float(fidelity.distortion) == pytest.approx(norm(g - out) / norm(g), rel=1e-4)
        snr = norm(out) / norm(g - out)
        assert float(fidelity.effective_snr) == pytest.approx(snr, rel=1e-4)
        assert float(fidelity.grad_norm_ratio) == pytest.approx(norm(out) / norm(g), rel=1e-4)
        assert float(fidelity.sign_flip_rate) == pytest.approx(np.mean(np.sign(g) != np.sign(out)))
    np.testing.assert_array_equal(updates["bias"], GRADIENTS["bias"])


@pytest.mark.parametrize("name", ["soft_clip", "wiener", "sigmoid"])
def test_nonlinearities_bend_the_core_and_metrics_see_it(name):
    tx = lro.logra_sketch(basis=lro.learn_basis(**LEARNED), nonlinearity=name, metrics=True)
    plain = lro.logra_sketch(basis=lro.learn_basis(**LEARNED))
    updates, states = updates_of(tx)
    linear, _ = updates_of(plain)
    g, out = (np.asarray(x["w"][2], np.float64) for x in (GRADIENTS, updates))
    v, _ = matrices(at(states, 3))
    c = v.T @ g
    if name == "soft_clip":
        s = 3 * np.sqrt(np.mean(c**2, axis=1, keepdims=True))
        c = s * np.tanh(c / s)
    elif name == "wiener":
        noise = (np.sum(g**2) - np.sum(c**2)) / (g.size - c.size)
        c = c * np.maximum(1 - noise / np.mean(c**2, axis=1, keepdims=True), 0)
    else:
        c = 1 / (1 + np.exp(-c))
    np.testing.assert_allclose(out, v @ c, atol=1e-5)
    assert np.abs(out - linear["w"][2]).max() > 1e-3
    fidelity = lro.metrics(jax.tree.map(jnp.asarray, at(states, 3))).leaves["w"]
    distortion = np.linalg.norm(g - out) / np.linalg.norm(g)
    assert float(fidelity.distortion) == pytest.approx(distortion, rel=1e-4)


def test_the_sigmoid_moves_weights_without_a_gradient():
    zeros = jax.tree.map(jnp.zeros_like, GRADIENTS)
    for name, still in (("sigmoid", False), ("soft_clip", True), ("wiener", True)):
        tx = lro.logra_sketch(basis=lro.learn_basis(**LEARNED), nonlinearity=name)
        updates, states = updates_of(tx, zeros)
        if still:
            assert not np.any(updates["w"])
        else:
            _, u = matrices(at(states, 1))
            half = u @ np.full((2, 10), 0.5)
            np.testing.assert_allclose(updates["w"][0], half, atol=1e-6)
            assert np.linalg.norm(half) == pytest.approx(0.5 * np.sqrt(2 * 10), rel=1e-5)


def test_untied_momentum_is_carried_and_lifted_by_the_decoder():
    basis = lro.learn_basis(**LEARNED, tied=False)
    tx = lro.logra_sketch(optax.sgd(0.1, momentum=0.9), basis, scale=2.0)
    updates, states = updates_of(tx)
    momentum = np.zeros((2, 10))
    for t in range(4):
        (old, _), (v, u) = matrices(at(states, t)), matrices(at(states, t + 1))
        # What the old core says about the gradient, seen by the new encoder.
        momentum = v.T @ old @ momentum
        momentum = 0.9 * momentum + v.T @ np.asarray(GRADIENTS["w"][t], np.float64)
        np.testing.assert_allclose(updates["w"][t], -0.2 * u @ momentum, atol=1e-4)


def test_untied_decay_acts_on_the_whole_weight():
    basis = lro.learn_basis(**LEARNED, tied=False)
    inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    decayed, _ = updates_of(lro.logra_sketch(inner, basis, scale=0.25))
    plain, _ = updates_of(lro.logra_sketch(optax.sgd(0.1), basis, scale=0.25))
    expected = np.broadcast_to(-0.05 * PARAMS["w"], (4, 6, 10))
    np.testing.assert_allclose(decayed["w"] - plain["w"], expected, atol=1e-5)


@pytest.mark.parametrize("nonlinearity", ["identity", "soft_clip", "wiener"])
def test_trains(nonlinearity):
    params, gradient_fn = regression()
    tx = lro.logra_adamw(0.02, 4, nonlinearity=nonlinearity, targets=[("hidden/kernel", 4)])
    tx = relaxed(tx)
    losses, _, state = train(tx, params, gradient_fn, 80)
    assert losses[-1] < 0.5 * losses[0]
    assert state.tracker_state.refreshes.tolist() == [80]
    assert avals(state) == avals(tx.init(params))


def test_bfloat16_weights_and_gradients():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = lro.logra_sketch(
        relaxed(optax.adam(0.1)), lro.learn_basis(2), nonlinearity="wiener", metrics=True
    )
    updates, states = updates_of(tx, sequence(params, 3), params)
    assert updates["w"].dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(updates["w"], np.float32)).all()
    assert states.tracker_state.reduction_basis["w"].dtype == jnp.float32


def test_compact_gradients_under_nonlinearities():
    params = {"w": PARAMS["w"]}
    grad_fn = lro.compact_value_and_grad(lambda p, x: jnp.sum(jnp.sin(x @ p["w"])))
    x = normal(3, (5, 6))
    results = {}
    for name in ("identity", "soft_clip", "wiener"):
        tx = lro.logra_sketch(optax.sgd(1.0), lro.refresh_basis(2), nonlinearity=name)
        state = tx.init(params)
        _, grads, bases = grad_fn(params, x, opt_state=state)
        if name == "wiener":
            with pytest.raises(ValueError, match="'w': nonlinearity='wiener' needs the full"):
                tx.update(grads, state, params, bases=bases)
        else:
            results[name] = tx.update(grads, state, params, bases=bases)[0]["w"]
    assert 0.7 < np.linalg.norm(results["soft_clip"]) / np.linalg.norm(results["identity"]) < 0.99


# Figures of the method's description


def test_snr_distortion_and_energy_are_one_number():
    def snr(distortion):
        return np.sqrt(1 - distortion**2) / distortion

    assert snr(0.02) == pytest.approx(50, abs=0.1)
    assert snr(0.0333) == pytest.approx(30, abs=0.1)
    assert snr(np.sqrt(1 - 0.9957)) == pytest.approx(15.2, abs=0.1)
    # And so it is in the metrics: a matrix with these singular values at rank 1.
    for energy, expected in ((0.9957, 15.2), (1 - 0.02**2, 50.0)):
        values = jnp.sqrt(jnp.asarray([energy, 1 - energy]))
        g = jnp.zeros((4, 6)).at[0, 0].set(values[0]).at[1, 1].set(values[1])
        tx = lro.logra_sketch(basis=lro.learn_basis(1), metrics=True)
        _, state = tx.update({"w": g}, tx.init({"w": g}))
        leaf = lro.metrics(state).leaves["w"]
        assert float(leaf.effective_snr) == pytest.approx(expected, rel=2e-2)
        assert float(leaf.energy) == pytest.approx(energy, rel=1e-4)


def test_the_weights_of_7b_alone_are_larger_than_what_is_told_of_the_whole():
    d, ffn, vocabulary, layers = 4096, 11008, 32000, 32

    def weights(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {
        "embed_tokens": {"embedding": weights(vocabulary, d)},
        "layers": {
            **{f"{n}_proj": {"kernel": weights(layers, d, d)} for n in "qkvo"},
            "gate_proj": {"kernel": weights(layers, d, ffn)},
            "up_proj": {"kernel": weights(layers, d, ffn)},
            "down_proj": {"kernel": weights(layers, ffn, d)},
        },
        "lm_head": {"kernel": weights(d, vocabulary)},
    }
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert nbytes == pytest.approx(13.5e9, rel=0.01)
    tx = lro.logra_adamw(1e-3, targets=lro.targets.logra())
    described = lro.describe(tx, params)
    assert {row.rank for row in described.rows} == {128, 64, 32, 256}
    # The state is small, float32 bases and moments included; the weights are not.
    assert described.state_bytes == pytest.approx(0.828e9, rel=0.01)


# What belongs in front, inside and behind


def test_clipping_the_core_is_clipping_the_lifted_update():
    clip = optax.clip_by_global_norm(0.5)
    params = {"w": PARAMS["w"], "other": normal(4, (6, 10))}
    gradients = sequence(params, 3)
    inside, _ = updates_of(lro.logra_sketch(clip, lro.learn_basis(**LEARNED)), gradients, params)
    sketch = lro.logra_sketch(basis=lro.learn_basis(**LEARNED))
    behind, _ = updates_of(optax.chain(sketch, clip), gradients, params)
    for path in params:
        np.testing.assert_allclose(inside[path], behind[path], rtol=1e-4, atol=1e-6)
    assert float(optax.tree.norm(at(inside, 0))) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), optax.apply_if_finite(tx, 2))]
)
def test_lion_inside_warns_and_says_where_it_belongs(wrap):
    tx = lro.logra_sketch(wrap(optax.lion(0.1)), lro.learn_basis(2))
    with pytest.warns(UserWarning, match=r"logra_sketch: .*Lion.*lro\.sign_lift\(\)"):
        tx.init(PARAMS)


def test_lion_elsewhere_does_not_warn():
    def lift(targets, state):
        return [t.view.lift(t.update, t.bases) for t in targets], state

    signs = lro.Lift("signs", lambda plan: (), lift, takes_signs=True)
    lro.galore_project(optax.lion(0.1), lro.refresh_basis(2), lift=signs).init(PARAMS)
    optax.chain(lro.galore_project(basis=lro.refresh_basis(2)), optax.lion(0.1)).init(PARAMS)
    # At full rank nothing is lifted.
    lro.galore_project(optax.lion(0.1), lro.refresh_basis(6, targets=[("w", 6)])).init(PARAMS)


def test_signs_inside_the_subspace_are_not_those_of_the_update():
    gradients = {"w": normal(5, (32, 48))}
    tracker = lro.refresh_basis(8, method="random")
    momentum = lro.galore_project(optax.scale(1.0), tracker)
    signs = lro.galore_project(optax.scale_by_sign(), tracker)
    lifted = np.asarray(momentum.update(gradients, momentum.init(gradients))[0]["w"])
    inside = np.asarray(signs.update(gradients, signs.init(gradients))[0]["w"])
    flipped = np.mean(np.sign(lifted) != np.sign(inside))
    assert 0.1 < flipped < 0.4
    assert np.std(np.abs(inside)) > 0.3 * np.mean(np.abs(inside))


def test_trust_ratios_belong_behind_the_lift():
    adam = relaxed(optax.scale_by_adam())
    behind = optax.chain(
        lro.galore_project(adam, lro.refresh_basis(2)), optax.scale_by_trust_ratio()
    )
    plain = lro.galore_project(adam, lro.refresh_basis(2))
    gradients = random_like(PARAMS, 1)
    update = np.asarray(plain.update(gradients, plain.init(PARAMS), PARAMS)[0]["w"])
    trusted = np.asarray(behind.update(gradients, behind.init(PARAMS), PARAMS)[0]["w"])
    weight = np.asarray(PARAMS["w"])
    ratio = np.linalg.norm(weight) / np.linalg.norm(update)
    np.testing.assert_allclose(trusted, ratio * update, rtol=1e-4)
    # So the step is as long as the weight; inside, it is as long as the weight's shadow.
    assert np.linalg.norm(trusted) == pytest.approx(np.linalg.norm(weight), rel=1e-4)
    inner = optax.chain(adam, optax.scale_by_trust_ratio())
    inside = lro.galore_project(inner, lro.refresh_basis(2))
    short = np.asarray(inside.update(gradients, inside.init(PARAMS), PARAMS)[0]["w"])
    assert np.linalg.norm(short) < 0.9 * np.linalg.norm(weight)


def test_trust_ratios_at_full_rank_are_lamb():
    full = lro.refresh_basis(6, targets=[("w", 6)])
    tx = optax.chain(
        lro.galore_project(relaxed(optax.scale_by_adam(eps=1e-6)), full),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(0.1),
    )
    lamb = relaxed(optax.lamb(0.1))
    gradients = random_like(PARAMS, 1)
    got = tx.update(gradients, tx.init(PARAMS), PARAMS)[0]
    expected = lamb.update(gradients, lamb.init(PARAMS), PARAMS)[0]
    np.testing.assert_array_equal(got["w"], expected["w"])


def bandit(seed, actions=96, states=72):
    """A contextual bandit whose reward is 1 for few actions and 0 for all others."""
    good = jnp.asarray(np.random.default_rng(seed).integers(0, actions, (states, 4)))
    eye = jnp.eye(states)

    def rewards(action, state):
        return jnp.any(good[state] == action[:, None], axis=1).astype(jnp.float32)

    def gradient(params, key):
        key, other = jax.random.split(key)
        state = jax.random.randint(key, (4,), 0, states)
        logits = jnp.matmul(eye[state], params["w"])
        action = jax.random.categorical(other, logits)
        reward = rewards(action, state)

        def surrogate(params):
            logp = jax.nn.log_softmax(jnp.matmul(eye[state], params["w"]))
            return -jnp.mean(reward * jnp.take_along_axis(logp, action[:, None], axis=1)[:, 0])

        return jax.grad(surrogate)(params), jnp.mean(reward)

    return {"w": jnp.zeros((states, actions))}, gradient


def test_the_recipe_for_sparse_rewards():
    params, gradient = bandit(0)
    tx = optax.chain(optax.clip_by_global_norm(0.1), lro.logra_adamw(0.05, rank=64))
    tx = relaxed(tx)

    @jax.jit
    def loop(params, state):
        def step(carry, key):
            params, state = carry
            gradients, reward = gradient(params, key)
            updates, state = tx.update(gradients, state, params)
            nothing = optax.tree.norm(gradients) == 0
            counts = optax.tree.get(state, "refreshes")[0]
            return (optax.apply_updates(params, updates), state), (reward, nothing, counts)

        return jax.lax.scan(step, (params, state), jax.random.split(jax.random.key(1), 600))

    (params, state), (reward, nothing, counts) = loop(params, tx.init(params))
    nothing = np.asarray(nothing)
    # Most early batches have no reward and teach nothing: not the weights, not the basis.
    assert nothing[:100].mean() > 0.5
    learned = np.diff(np.concatenate([[0], counts]))
    np.testing.assert_array_equal(learned, ~nothing)
    basis = np.asarray(optax.tree.get(state, "reduction_basis")["w"])
    np.testing.assert_allclose(basis.T @ basis, np.eye(64), atol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    assert np.mean(reward[-100:]) > 3 * np.mean(reward[:100])
