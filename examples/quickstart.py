"""Trains a small Flax NNX model with AdamW in low-rank subspaces: python examples/quickstart.py."""

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

    def __call__(self, tokens: jax.Array) -> jax.Array:  # noqa: D102
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(nnx.gelu(x))
        return self.head(x)


def loss_fn(params, graph, text):
    logits = nnx.merge(graph, params)(text[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


# In place of optax.adamw: moments of 256x256 become 32x256. Its learning rates are higher, since
# projected weights move by a quarter of them (scale=0.25).
tx = lro.lowrank_adamw(1e-2, rank=32)


@jax.jit
def train_step(params, opt_state, graph, text):
    loss, grads = jax.value_and_grad(loss_fn)(params, graph, text)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


graph, params = nnx.split(Model(width=256, depth=4, rngs=nnx.Rngs(0)), nnx.Param)
print(lro.describe(tx, params))  # what will be projected; the rest is trained full-rank
text = jnp.frombuffer(pathlib.Path(__file__).read_bytes(), jnp.uint8).astype(jnp.int32)
opt_state = tx.init(params)
for step in range(1, 11):
    params, opt_state, loss = train_step(params, opt_state, graph, text)
    print(f"step {step:>2}  loss {loss:.3f}")
