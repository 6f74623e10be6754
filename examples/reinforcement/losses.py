"""The formulas of PPO and GRPO, as functions of arrays.

Arrays are ``(batch, length)``, one entry an action, unless said otherwise; ``mask`` says which
entries are actions, and the others count for nothing.
"""

import jax
import jax.numpy as jnp


def token_log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of tokens ``(batch, length)`` by logits ``(batch, length, vocab)``."""
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, tokens[:, :, None], axis=2)[:, :, 0]


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over actions; 0 where there are none."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask).astype(x.dtype), 1.0)


def at_the_end(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Gives the reward of a sequence ``(batch,)`` to its last action."""
    following = jnp.concatenate([mask[:, 1:], jnp.zeros_like(mask[:, :1])], axis=1)
    return jnp.where(mask & ~following, rewards[:, None], 0.0)


def generalized_advantages(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, discount: float, decay: float
) -> tuple[jax.Array, jax.Array]:
    r"""Generalized advantage estimation.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
              A_t = \delta_t + \gamma\lambda A_{t+1}

    After the last action both the value and the advantage are 0.

    Args:
        rewards: of each action.
        values: predicted before each action.
        mask: which are actions.
        discount: :math:`\gamma`.
        decay: :math:`\lambda`; 1 trusts what was sampled, 0 the value head.

    Returns:
        The advantages, and the returns :math:`A_t + V_t` that values should predict.

    References:
        Schulman et al., `High-Dimensional Continuous Control Using Generalized Advantage
        Estimation <https://arxiv.org/abs/1506.02438>`_, 2015
    """
    values = jnp.where(mask, values, 0.0)

    def step(
        later: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        next_advantage, next_value = later
        reward, value, is_action = now
        advantage = reward + discount * (next_value + decay * next_advantage) - value
        advantage = jnp.where(is_action, advantage, 0.0)
        return (advantage, value), advantage

    zeros = jnp.zeros_like(values[:, 0])
    _, advantages = jax.lax.scan(step, (zeros, zeros), (rewards.T, values.T, mask.T), reverse=True)
    return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def group_advantages(rewards: jax.Array, size: int) -> jax.Array:
    r"""GRPO's advantages, :math:`(r - \mathrm{mean}) / \mathrm{std}` among answers to one prompt.

    Args:
        rewards: ``(batch,)``, consecutive ``size`` of them belonging to one prompt.
        size: of a group.

    Returns:
        ``(batch,)``; zeros where a whole group has the same reward, which says nothing.

    References:
        Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024
    """
    groups = jnp.reshape(rewards, (-1, size))
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    spread = jnp.sqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True))
    return jnp.reshape(centred / (spread + 1e-4), (-1,))


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Shifts and scales actions to mean 0 and variance 1."""
    centred = x - masked_mean(x, mask)
    return jnp.where(mask, centred / jnp.sqrt(masked_mean(centred**2, mask) + 1e-8), 0.0)


def clipped_ratio_loss(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, clip: float
) -> jax.Array:
    r"""PPO's loss: no gain from moving a probability by more than a factor :math:`1 \pm c`.

    .. math:: -\mathrm{mean}\,\min(\rho A,\ \mathrm{clip}(\rho, 1 - c, 1 + c)\,A)

    Args:
        log_ratio: :math:`\log\rho`, new minus old log-probability.
        advantages: :math:`A`.
        mask: which are actions.
        clip: :math:`c`.

    Returns:
        A scalar.

    References:
        Schulman et al., `Proximal Policy Optimization Algorithms
        <https://arxiv.org/abs/1707.06347>`_, 2017
    """
    # What is masked must not overflow either: its zero gradient would become NaN.
    ratio = jnp.exp(jnp.where(mask, log_ratio, 0.0))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    return -masked_mean(gain, mask)


def kl_estimate(log_probs: jax.Array, others: jax.Array, mask: jax.Array) -> jax.Array:
    r"""How far a policy is from another, from tokens that it sampled.

    .. math:: \mathrm{KL}(\pi\,\|\,\pi') \approx
              \mathrm{mean}\bigl(\pi'/\pi - \log(\pi'/\pi) - 1\bigr)

    Never negative, unlike the mean of :math:`\log(\pi/\pi')`, and as unbiased.

    Args:
        log_probs: under the policy that sampled.
        others: under the other one.
        mask: which are actions.

    Returns:
        A scalar, in nats a token.

    References:
        Schulman, `Approximating KL Divergence <http://joschu.net/blog/kl-approx.html>`_, 2020
    """
    log_ratio = jnp.where(mask, others - log_probs, 0.0)
    return masked_mean(jnp.expm1(log_ratio) - log_ratio, mask)
