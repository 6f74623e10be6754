"""One update: where it stops, what the guard changes about it, and advantages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reinforcement import learning, optimizers
from reinforcement.guard import Learner
from reinforcement.optimizers import CLASSES

pytestmark = pytest.mark.usefixtures("standard_promotion")


SGD = optax.with_extra_args_support(optax.sgd(0.1))


def update_of(acting, rollouts, tx=SGD, **settings):
    task, policy, params, _ = acting
    settings = learning.Settings("ppo", **settings)
    batch = learning.with_advantages(rollouts, settings)
    loss = learning.make_loss(task, policy, settings)
    update = jax.jit(learning.make_update(loss, tx, settings))
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
    tx = optimizers.make("galore", 1e-2, optimizers.Options(dict.fromkeys(CLASSES, 4)))
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
    ppo = learning.with_advantages(rollouts, learning.Settings("ppo"))
    mask = np.asarray(rollouts.mask)
    np.testing.assert_allclose(np.mean(np.asarray(ppo.advantages)[mask]), 0, atol=1e-5)
    varied = rollouts._replace(rewards=jnp.arange(32.0))
    grpo = learning.with_advantages(varied, learning.Settings("grpo", group=4))
    advantages = np.asarray(grpo.advantages)
    assert np.all(advantages[~mask] == 0)
    np.testing.assert_allclose(advantages[:4, 0], np.array([-3, -1, 1, 3]) / 5**0.5, rtol=1e-3)
    for row, actions in zip(advantages, mask, strict=True):
        assert len(set(row[actions].tolist())) == 1  # one judgement a sequence
