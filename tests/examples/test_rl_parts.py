"""The guard, the policy, one update and the optimizers, each alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
import rl_guard
import rl_learning
import rl_optimizers
import rl_rollouts
import rl_tasks
from decoder import DecoderConfig
from rl_guard import GuardOptions, Learner
from rl_optimizers import CLASSES
from tests.helpers.data import normal


@pytest.fixture(autouse=True, scope="module")
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def learner(number: float) -> Learner:
    tree = {"w": jnp.full(3, float(number))}
    return Learner(tree, tree, jnp.ones([]), jnp.asarray(0.005))


def guarded(options, rewards, losses=None):
    """Feeds a guard with rewards of states that are numbered 0, 1, …; where it went on from."""
    watch = jax.jit(functools.partial(rl_guard.watch, options))
    guard = rl_guard.start_guard(learner(0.0))
    found = []
    for number, reward in enumerate(rewards):
        loss = jnp.asarray(0.0 if losses is None else losses[number])
        guard, after, restored = watch(
            guard, learner(number), learner(number + 0.5), jnp.asarray(reward), loss
        )
        found.append((after, bool(restored)))
    return guard, found


def test_a_collapsed_run_goes_back_to_the_best_state():
    # Running rewards at a memory of .5: .4, .6, .7, .65, .325
    guard, found = guarded(GuardOptions(0.8, 0.5), [0.4, 0.8, 0.8, 0.6, 0.0])
    assert [restored for _, restored in found] == [False, False, False, False, True]
    assert [float(after.params["w"][0]) for after, _ in found] == [0.5, 1.5, 2.5, 3.5, 2.0]
    after = found[-1][0]
    np.testing.assert_array_equal(after.opt_state["w"], 2.0)
    assert (float(after.step_scale), guard.restores) == (0.5, 1)
    np.testing.assert_allclose(after.kl_weight, 0.02)  # twice .005 is below the least
    np.testing.assert_allclose([guard.best, guard.average], 0.7, rtol=1e-6)


def test_a_loss_that_is_not_finite_goes_back_whatever_the_reward():
    _, found = guarded(GuardOptions(0.8, 0.5), [0.5, 0.6, 0.7], [0.0, 0.0, float("nan")])
    assert [restored for _, restored in found] == [False, False, True]
    np.testing.assert_array_equal(found[-1][0].params["w"], 1.0)


def test_noise_and_low_rewards_are_no_collapse():
    _, found = guarded(GuardOptions(0.7, 0.7), [0.0, 0.02, 0.0, 0.5, 0.4, 0.5, 0.35])
    assert not any(restored for _, restored in found)


def test_no_guard_keeps_what_came():
    _, found = guarded(GuardOptions(collapse=0.0), [1.0, 0.0, 0.0], [0.0, 0.0, float("nan")])
    assert [float(after.params["w"][0]) for after, _ in found] == [0.5, 1.5, 2.5]


CONFIG = DecoderConfig(20, 16, 24, 1, 2, 2, max_position_embeddings=10)


@pytest.fixture(scope="module")
def acting():
    """A task, its policy with a value head that is not 0, and two sets of parameters."""
    task = rl_tasks.Paths(0)
    init, policy = rl_rollouts.actor_critic(CONFIG)
    params, other = (
        init(jax.random.key(seed)) | {"value_head": {"kernel": normal(seed, (16, 1))}}
        for seed in (0, 1)
    )
    return task, policy, params, other


@pytest.fixture(scope="module")
def rollouts(acting):
    task, policy, params, other = acting
    prompts = jnp.asarray(task.train_prompts[:32])
    run = jax.jit(functools.partial(rl_rollouts.roll_out, task, policy))
    return run(params, other, prompts, jax.random.key(2))


def test_the_value_head_reads_the_features_that_the_logits_read(acting):
    _, policy, params, _ = acting
    tokens = jnp.arange(8)[None]
    logits, values = policy(params, tokens)
    assert (logits.shape, values.shape) == ((1, 8, 20), (1, 8))
    column = params["lm_head"]["kernel"][:, 3:4]
    _, same = policy(params | {"value_head": {"kernel": column}}, tokens)
    np.testing.assert_allclose(same, logits[..., 3], rtol=1e-5)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        rl_rollouts.actor_critic(DecoderConfig.tiny())


def test_rollouts_record_what_the_policy_says_of_its_own_completions(acting, rollouts):
    task, policy, params, other = acting
    np.testing.assert_array_equal(rollouts.tokens[:, :2], task.train_prompts[:32])
    np.testing.assert_array_equal(rollouts.rewards, task.score(rollouts.tokens).rewards)
    for found, given in ((rollouts.log_probs, params), (rollouts.reference_log_probs, other)):
        for position in (2, 9):  # the first token that was sampled, and the last
            logits, values = policy(given, rollouts.tokens[:, :position])
            log_probs = jax.nn.log_softmax(logits[:, -1])
            chosen = np.take_along_axis(log_probs, rollouts.tokens[:, position, None], 1)[:, 0]
            np.testing.assert_allclose(found[:, position - 2], chosen, rtol=1e-4)
            if given is params:
                np.testing.assert_allclose(
                    rollouts.values[:, position - 2], values[:, -1], rtol=1e-4, atol=1e-5
                )


def test_samples_follow_the_policy(acting):
    _, policy, params, _ = acting
    prompts = jnp.tile(jnp.array([[3, 7]]), (4000, 1))
    tokens = jax.jit(functools.partial(rl_rollouts.complete, policy), static_argnums=2)(
        params, prompts, 1, jax.random.key(0)
    )
    shares = np.bincount(tokens[:, 2], minlength=20) / 4000
    expected = jax.nn.softmax(policy(params, prompts[:1])[0][0, -1])
    np.testing.assert_allclose(shares, expected, atol=0.03)


SGD = optax.with_extra_args_support(optax.sgd(0.1))


def update_of(acting, rollouts, tx=SGD, **settings):
    task, policy, params, _ = acting
    settings = rl_learning.Settings("ppo", **settings)
    batch = rl_learning.with_advantages(rollouts, settings)
    loss = rl_learning.make_loss(task, policy, settings)
    update = jax.jit(rl_learning.make_update(loss, tx, settings))
    start = Learner(params, tx.init(params), jnp.ones([]), jnp.asarray(0.1))
    return update, start, batch


def distance(a, b):
    return float(optax.tree.norm(jax.tree.map(lambda x, y: x - y, a.params, b.params)))


def test_updates_stop_where_the_policy_has_moved_too_far(acting, rollouts):
    update, start, batch = update_of(acting, rollouts, stop_kl=1e-4)
    moved, metrics = update(start, batch)
    np.testing.assert_allclose(metrics["step_kl"], 0, atol=1e-6)  # the policy that sampled
    assert metrics["stopped"] == 0
    assert distance(moved, start) > 0
    stayed, metrics = update(moved, batch)
    assert metrics["step_kl"] > 1e-4
    assert metrics["stopped"] == 1
    assert distance(stayed, moved) == 0


def test_the_guards_numbers_reach_the_update(acting, rollouts):
    update, start, batch = update_of(acting, rollouts)
    whole, metrics = update(start, batch)
    half, _ = update(start._replace(step_scale=jnp.asarray(0.5)), batch)
    np.testing.assert_allclose(distance(half, start), distance(whole, start) / 2, rtol=1e-3)
    _, free = update(start._replace(kl_weight=jnp.asarray(0.0)), batch)
    difference = 0.1 * metrics["reference_kl"]
    assert difference > 0.01
    np.testing.assert_allclose(metrics["loss"] - free["loss"], difference, rtol=1e-4)


def test_matrix_free_updates_are_the_same(acting, rollouts):
    tx = rl_optimizers.make("galore", 1e-2, rl_optimizers.Options(dict.fromkeys(CLASSES, 4)))
    update, start, batch = update_of(acting, rollouts, tx)
    compact, _, _ = update_of(acting, rollouts, tx, matrix_free=True)
    ours, theirs = (f(*f(start, batch)[:1], batch) for f in (compact, update))  # two updates
    for name in ("loss", "value_loss", "step_kl"):
        np.testing.assert_allclose(ours[1][name], theirs[1][name], rtol=1e-3)
    assert distance(theirs[0], start) > 0.01
    assert distance(ours[0], theirs[0]) < 0.01 * distance(theirs[0], start)
    # Of cores, which are shorter than the gradients that they stand for.
    assert ours[1]["grad_norm"] < 0.99 * theirs[1]["grad_norm"]


def test_ppo_whitens_and_grpo_compares_groups(rollouts):
    ppo = rl_learning.with_advantages(rollouts, rl_learning.Settings("ppo"))
    mask = np.asarray(rollouts.mask)
    np.testing.assert_allclose(np.mean(np.asarray(ppo.advantages)[mask]), 0, atol=1e-5)
    varied = rollouts._replace(rewards=jnp.arange(32.0))
    grpo = rl_learning.with_advantages(varied, rl_learning.Settings("grpo", group=4))
    advantages = np.asarray(grpo.advantages)
    assert np.all(advantages[~mask] == 0)
    np.testing.assert_allclose(advantages[:4, 0], np.array([-3, -1, 1, 3]) / 5**0.5, rtol=1e-3)
    for row, actions in zip(advantages, mask, strict=True):
        assert len(set(row[actions].tolist())) == 1  # one judgement a sequence


def params_of_a_layer():
    shapes = {
        "layers/mlp/up_proj/kernel": (12, 20),
        "layers/self_attn/q_proj/kernel": (12, 12),
        "embed_tokens/embedding": (16, 12),
        "lm_head/kernel": (12, 16),
        "value_head/kernel": (12, 1),
        "norm/scale": (12,),
    }
    return {path: jnp.ones(shape) for path, shape in shapes.items()}


@pytest.mark.parametrize("name", ["galore", "logra"])
def test_every_class_has_its_own_rank(name):
    ranks = {"mlp": 2, "attention": 3, "embedding": None, "head": 0.5}
    tx = rl_optimizers.make(name, 1e-3, rl_optimizers.Options(ranks))
    rows = {row.path: row.rank for row in lro.describe(tx, params_of_a_layer()).rows}
    assert [rows[path] for path in params_of_a_layer()] == [2, 3, 0, 6, 0, 0]
    tx = rl_optimizers.make(name, 1e-3, rl_optimizers.Options(ranks), ("mlp",))
    rows = {row.path: row.rank for row in lro.describe(tx, params_of_a_layer()).rows}
    assert [rows[path] for path in params_of_a_layer()] == [2, 0, 0, 0, 0, 0]


def test_stages_enable_what_has_a_rank():
    ranks = {"mlp": 2, "attention": 3, "embedding": None, "head": 4}
    stages = rl_optimizers.Stages(ranks, 10)
    last = ("mlp", "attention", "head")
    assert [stages.at(i) for i in (0, 9, 10, 20, 99)] == [last[:1], last[:1], last[:2], last, last]
    assert rl_optimizers.Stages(ranks).at(0) == last
    assert rl_optimizers.Stages(ranks | {"mlp": None}, 10).at(0) == ("attention",)
    assert rl_optimizers.Stages({}).at(0) == ()


@pytest.mark.parametrize("name", ["galore", "logra"])
def test_clipping_comes_after_the_sketch(name):
    """What the subspace leaves out does not shorten what it keeps."""
    options = rl_optimizers.Options({"mlp": 1}, clip=1.0)
    tx = rl_optimizers.make(name, 1e-3, options)
    params = {"mlp/up_proj/kernel": jnp.zeros((4, 6))}
    first = {"mlp/up_proj/kernel": jnp.zeros((4, 6)).at[0, 0].set(0.5)}
    _, state = tx.update(first, tx.init(params), params)

    def mu(gradient):
        _, after = tx.update({"mlp/up_proj/kernel": gradient}, state, params)
        found = optax.tree.get(after, "mu")["mlp/up_proj/kernel"]
        return float(jnp.linalg.norm(found))

    inside = first["mlp/up_proj/kernel"]
    # The norm of both together is 5, and that of the part inside .5, which needs no clipping.
    outside = 5.0 if name == "galore" else 0.2  # a learned basis would follow a large one
    both = mu(inside.at[3, 4].set(outside))
    np.testing.assert_allclose(both, mu(inside), rtol=0.1)
    assert mu(8 * inside) < 0.15  # .9 · .05 + .1 · 1, and not + .1 · 4
