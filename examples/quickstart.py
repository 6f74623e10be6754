"""Trains a small Flax NNX model with AdamW in low-rank subspaces: ten steps, a few seconds.

python examples/quickstart.py
"""

import pathlib

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lowrank_optax as lro


class Model(nnx.Module):
    """Predicts the next byte from the one before, by residual layers."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the byte after each of ``tokens``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(nnx.gelu(x))
        return self.head(x)


# optax works on a pytree of arrays, so the parameters are split from the rest of the model.
graph, params = nnx.split(Model(width=256, depth=4, rngs=nnx.Rngs(0)), nnx.Param)

# In place of optax.adamw. The moments of a 256x256 weight become 32x256. The learning rate may be
# higher than AdamW's, since projected weights move by a quarter of it (scale=0.25).
tx = lro.lowrank_adamw(1e-2, rank=32)
opt_state = tx.init(params)

# What will be projected, before a step is made: embedding, head and biases are trained full-rank.
print(lro.describe(tx, params))

# Nothing is downloaded: the text to learn is this file.
text = jnp.frombuffer(pathlib.Path(__file__).read_bytes(), jnp.uint8).astype(jnp.int32)


def loss_fn(params: nnx.State) -> jax.Array:
    logits = nnx.merge(graph, params)(text[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


@jax.jit
def train_step(params: nnx.State, opt_state: optax.OptState):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for step in range(1, 11):
    params, opt_state, loss = train_step(params, opt_state)
    print(f"step {step:>2}  loss {loss:.3f}")
