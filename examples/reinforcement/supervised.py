"""Supervised training on a task's demonstrations: where reinforcement learning starts from."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from model.decoder import Params, next_token_loss
from reinforcement.rollouts import Policy
from reinforcement.tasks import Task

CHUNK = 50
"""Updates in one compiled loop."""


def imitate(
    task: Task,
    policy: Policy,
    params: Params,
    seed: int,
    steps: int,
    *,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
    observe: Callable[[int, float], None] = lambda step, loss: None,
) -> Params:
    """Trains by AdamW with a cosine schedule to predict demonstrations.

    Args:
        task: gives them.
        policy: from `actor_critic`.
        params: to start from; donated.
        seed: of the demonstrations.
        steps: updates.
        batch_size: demonstrations an update.
        learning_rate: at the start.
        observe: told the number of updates and the last loss, now and then.

    Returns:
        The parameters.
    """
    warmup = min(50, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps, 0.0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    first = task.prompt_length - 1

    def loss_fn(params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        logits, _ = policy(params, tokens[:, :-1])
        return next_token_loss(logits[:, first:], tokens[:, task.prompt_length :], mask)

    def step(
        carry: tuple[Params, optax.OptState], number: jax.Array
    ) -> tuple[tuple[Params, optax.OptState], jax.Array]:
        params, opt_state = carry
        key = jax.random.fold_in(jax.random.key(seed), number)
        loss, grads = jax.value_and_grad(loss_fn)(params, *task.demonstrations(key, batch_size))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss  # type: ignore[return-value]

    run = jax.jit(lambda carry, numbers: jax.lax.scan(step, carry, numbers), donate_argnums=0)
    carry = params, tx.init(params)
    for begin in range(0, steps, CHUNK):
        numbers = jnp.arange(begin, min(begin + CHUNK, steps))
        carry, found = run(carry, numbers)
        observe(begin + len(numbers), float(found[-1]))
    return carry[0]
