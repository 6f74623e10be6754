"""One iteration of PPO or GRPO, as one jitted function: roll out, then a few epochs of updates."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro
from model.decoder import Params
from reinforcement import losses
from reinforcement.guard import Guard, GuardOptions, Learner, watch
from reinforcement.rollouts import Policy, Rollouts, complete, evaluate_actions, roll_out
from reinforcement.tasks import Task, draw_prompts

ALGORITHMS = ("ppo", "grpo")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an iteration goes.

    Attributes:
        algorithm: ``"ppo"``, with a value head and generalized advantages, or ``"grpo"``, which
            compares answers to the same prompt.
        rollouts: sequences an iteration.
        group: answers to each prompt in GRPO.
        epochs: passes over the rollouts.
        minibatches: updates a pass.
        clip_ratio: how far an update may gain from moving a probability.
        discount: of later rewards, in PPO.
        decay: of later temporal differences, in PPO.
        value_weight: of the value head's squared error, in PPO.
        stop_kl: divergence from the policy that sampled, in nats a token, above which the
            iteration's remaining updates are left out; 0 never stops.
        matrix_free: make cores of projected weights' gradients directly.
    """

    algorithm: str
    rollouts: int = 256
    group: int = 8
    epochs: int = 2
    minibatches: int = 2
    clip_ratio: float = 0.2
    discount: float = 1.0
    decay: float = 0.95
    value_weight: float = 0.5
    stop_kl: float = 0.0
    matrix_free: bool = False


class Batch(NamedTuple):
    """Rollouts with their advantages and, for a value head, returns."""

    rollouts: Rollouts
    advantages: jax.Array
    returns: jax.Array


def with_advantages(rollouts: Rollouts, settings: Settings) -> Batch:
    """Judges every action."""
    if settings.algorithm == "grpo":
        advantages = losses.group_advantages(rollouts.rewards, settings.group)
        spread = jnp.where(rollouts.mask, advantages[:, None], 0.0)
        return Batch(rollouts, spread, jnp.zeros_like(spread))
    rewards = losses.at_the_end(rollouts.rewards, rollouts.mask)
    advantages, returns = losses.generalized_advantages(
        rewards, rollouts.values, rollouts.mask, settings.discount, settings.decay
    )
    return Batch(rollouts, losses.whiten(advantages, rollouts.mask), returns)


def make_loss(task: Task, policy: Policy, settings: Settings) -> Callable[..., Any]:
    """``loss(params, batch, kl_weight) -> loss, metrics``, for PPO or GRPO."""

    def loss_fn(
        params: Params, batch: Batch, kl_weight: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        rollouts = batch.rollouts
        mask = rollouts.mask
        log_probs, values = evaluate_actions(policy, params, rollouts.tokens, task.prompt_length)
        log_ratio = log_probs - rollouts.log_probs
        loss = losses.clipped_ratio_loss(log_ratio, batch.advantages, mask, settings.clip_ratio)
        reference_kl = losses.kl_estimate(log_probs, rollouts.reference_log_probs, mask)
        loss = loss + kl_weight * reference_kl
        metrics = {
            # The old policy sampled, so the estimate is of its divergence from the new one.
            "step_kl": losses.kl_estimate(rollouts.log_probs, log_probs, mask),
            "reference_kl": reference_kl,
            "clipped": losses.masked_mean(
                (jnp.abs(jnp.expm1(log_ratio)) > settings.clip_ratio).astype(jnp.float32), mask
            ),
        }
        if settings.algorithm == "ppo":
            value_loss = losses.masked_mean((values - batch.returns) ** 2, mask)
            loss = loss + settings.value_weight * value_loss
            metrics["value_loss"] = value_loss
        return loss, metrics | {"loss": loss}

    return loss_fn


Update = Callable[[Learner, Batch], tuple[Learner, dict[str, jax.Array]]]


def make_update(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformationExtraArgs, settings: Settings
) -> Update:
    """One update on one minibatch, which is left out where the policy has moved too far."""
    full = jax.value_and_grad(loss_fn, has_aux=True)
    compact = lro.compact_value_and_grad(loss_fn, has_aux=True)

    def update(learner: Learner, batch: Batch) -> tuple[Learner, dict[str, jax.Array]]:
        extra = {}
        if settings.matrix_free:
            (_, metrics), grads, bases = compact(
                learner.params, batch, learner.kl_weight, opt_state=learner.opt_state
            )
            extra = {"bases": bases}
        else:
            (_, metrics), grads = full(learner.params, batch, learner.kl_weight)
        metrics["grad_norm"] = optax.tree.norm(grads)

        def apply(learner: Learner) -> Learner:
            updates, opt_state = tx.update(grads, learner.opt_state, learner.params, **extra)
            updates = jax.tree.map(lambda u: u * learner.step_scale.astype(u.dtype), updates)
            params: Any = optax.apply_updates(learner.params, updates)
            return learner._replace(params=params, opt_state=opt_state)

        if not settings.stop_kl:
            return apply(learner), metrics | {"stopped": jnp.zeros([])}
        too_far = metrics["step_kl"] > settings.stop_kl
        learner = jax.lax.cond(too_far, lambda learner: learner, apply, learner)
        return learner, metrics | {"stopped": too_far.astype(jnp.float32)}

    return update


class State(NamedTuple):
    """All that changes while training, for checkpoints."""

    learner: Learner
    guard: Guard


Iteration = Callable[[State, Params, jax.Array], tuple[State, dict[str, jax.Array]]]
"""``iteration(state, reference, key) -> state, metrics``."""


def make_iteration(
    task: Task,
    policy: Policy,
    tx: optax.GradientTransformationExtraArgs,
    settings: Settings,
    guarding: GuardOptions,
) -> Iteration:
    """An iteration, jitted; the old state gives its memory to the new one.

    Args:
        task: prompts and rewards.
        policy: from `actor_critic`.
        tx: the optimizer.
        settings: how it goes.
        guarding: when to go back to an earlier state.

    Returns:
        The `Iteration`. Its metrics are the reward and the mean length of the rollouts, means over
        the updates of what the losses report, and what the guard did.
    """
    update = make_update(make_loss(task, policy, settings), tx, settings)
    repeats = settings.group if settings.algorithm == "grpo" else 1

    def shuffled(batch: Batch, key: jax.Array) -> Batch:
        order = jax.random.permutation(key, settings.rollouts)
        shape = (settings.minibatches, settings.rollouts // settings.minibatches)
        return jax.tree.map(lambda x: jnp.reshape(x[order], (*shape, *x.shape[1:])), batch)

    def iteration(
        state: State, reference: Params, key: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        before = state.learner
        asked, acted, order = jax.random.split(key, 3)
        prompts = draw_prompts(task.train_prompts, asked, settings.rollouts // repeats)
        prompts = jnp.repeat(prompts, repeats, axis=0)
        rollouts = roll_out(task, policy, before.params, reference, prompts, acted)
        batch = with_advantages(rollouts, settings)

        def epoch(learner: Learner, key: jax.Array) -> tuple[Learner, dict[str, jax.Array]]:
            return jax.lax.scan(update, learner, shuffled(batch, key))

        after, measured = jax.lax.scan(epoch, before, jax.random.split(order, settings.epochs))
        metrics = {name: jnp.mean(values) for name, values in measured.items()}
        metrics["reward"] = jnp.mean(rollouts.rewards)
        metrics["length"] = jnp.mean(jnp.sum(rollouts.mask, axis=1).astype(jnp.float32))
        guard, after, restored = watch(
            guarding, state.guard, before, after, metrics["reward"], metrics["loss"]
        )
        metrics |= {"restored": restored.astype(jnp.float32), "kl_weight": after.kl_weight}
        metrics["step_scale"] = after.step_scale
        return State(after, guard), metrics

    return jax.jit(iteration, donate_argnums=0)


def make_scorer(task: Task, policy: Policy, repeats: int) -> Callable[[Params, jax.Array], float]:
    """The mean reward on the held-out prompts, each answered ``repeats`` times."""
    prompts = jnp.repeat(jnp.asarray(task.test_prompts), repeats, axis=0)

    @jax.jit
    def score(params: Params, key: jax.Array) -> jax.Array:
        tokens = complete(policy, params, prompts, task.completion_length, key)
        return jnp.mean(task.score(tokens).rewards)

    return lambda params, key: float(score(params, key))
