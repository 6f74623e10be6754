"""The policy, and what it does: completions with the log-probabilities and values they had."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.decoder import DecoderConfig, Params, functional
from reinforcement.losses import token_log_probs
from reinforcement.tasks import Task

Policy = Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]
"""``policy(params, tokens) -> logits, values``: ``(batch, length, vocab)``, ``(batch, length)``."""


def actor_critic(config: DecoderConfig) -> tuple[Callable[[jax.Array], Params], Policy]:
    """The shared decoder with a value head.

    The value is one more column beside the LM head, so that both read the same features in one
    pass. It is a parameter of its own, ``value_head/kernel``, and starts at 0.

    Args:
        config: the shape of the decoder; its head must not be tied to the embedding.

    Returns:
        ``init(key) -> params`` and the `Policy`.
    """
    if config.tie_word_embeddings:
        raise ValueError("a value head needs features: set tie_word_embeddings=False")
    init_decoder, apply = functional(config)

    def init(key: jax.Array) -> Params:
        column = jnp.zeros((config.hidden_size, 1), config.param_dtype)
        return init_decoder(key) | {"value_head": {"kernel": column}}

    def policy(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        rest = dict(params)
        heads = [params["lm_head"]["kernel"], rest.pop("value_head")["kernel"]]
        outputs = apply(rest | {"lm_head": {"kernel": jnp.concatenate(heads, axis=1)}}, tokens)
        return outputs[..., :-1], outputs[..., -1]

    return init, policy


class Rollouts(NamedTuple):
    """Completions and all that the losses need of them, ``(batch, completion_length)`` each.

    Attributes:
        tokens: prompts with completions, ``(batch, prompt_length + completion_length)``.
        mask: which tokens of a completion are actions.
        rewards: one a sequence, ``(batch,)``.
        log_probs: of the actions, under the policy that sampled them.
        values: predicted before each action.
        reference_log_probs: of the actions, under the reference.
    """

    tokens: jax.Array
    mask: jax.Array
    rewards: jax.Array
    log_probs: jax.Array
    values: jax.Array
    reference_log_probs: jax.Array


def evaluate_actions(
    policy: Policy, params: Params, tokens: jax.Array, prompt_length: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and values of the tokens behind the prompt."""
    logits, values = policy(params, tokens[:, :-1])
    actions = tokens[:, prompt_length:]
    first = prompt_length - 1  # the position that predicts the first action
    return token_log_probs(logits[:, first:], actions), values[:, first:]


def complete(
    policy: Policy, params: Params, prompts: jax.Array, length: int, key: jax.Array
) -> jax.Array:
    """Samples completions, one token after the other.

    Every token reads the whole sequence again. A cache of keys and values would save most of
    that for long texts; for a dozen tokens it is not worth its code.

    Args:
        policy: from `actor_critic`.
        params: its parameters.
        prompts: ``(batch, prompt_length)``.
        length: how many tokens to sample.
        key: what they are sampled with.

    Returns:
        Prompts with completions.
    """
    begin = prompts.shape[1]
    tokens = jnp.pad(prompts, ((0, 0), (0, length)))

    def step(tokens: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        position, key = drawn
        logits, _ = policy(params, tokens[:, :-1])
        now = jax.lax.dynamic_index_in_dim(logits, position - 1, axis=1, keepdims=False)
        sampled = jax.random.categorical(key, now).astype(tokens.dtype)
        return jax.lax.dynamic_update_index_in_dim(tokens, sampled, position, axis=1), None

    positions = jnp.arange(begin, begin + length)
    return jax.lax.scan(step, tokens, (positions, jax.random.split(key, length)))[0]


def roll_out(
    task: Task,
    policy: Policy,
    params: Params,
    reference: Params,
    prompts: jax.Array,
    key: jax.Array,
) -> Rollouts:
    """Completes prompts, scores them, and records what the losses need.

    Args:
        task: says what completions are worth.
        policy: from `actor_critic`.
        params: those that act.
        reference: those that the policy should stay close to.
        prompts: ``(batch, prompt_length)``.
        key: what is sampled with.

    Returns:
        The `Rollouts`.
    """
    tokens = complete(policy, params, prompts, task.completion_length, key)
    scores = task.score(tokens)
    begin = task.prompt_length
    log_probs, values = evaluate_actions(policy, params, tokens, begin)
    reference_log_probs, _ = evaluate_actions(policy, reference, tokens, begin)
    return Rollouts(tokens, scores.mask, scores.rewards, log_probs, values, reference_log_probs)
