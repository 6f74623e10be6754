"""What tunix's trainers are given in `tunix_training.py`: a model, a tokenizer, a placed state."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import tunix
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3

import lowrank_optax as lro

MODEL = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
)
"""A Qwen3 that a laptop trains; bytes are its tokens."""


class Tokenizer:
    """Bytes, with control characters that text does not have as marks; what tunix asks for."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Text of bytes, marks left out."""
        return bytes(i for i in ids if i > self.eos_id()).decode(errors="replace")

    def pad_id(self) -> int:
        """Fills up."""
        return 0

    def bos_id(self) -> int:
        """Begins a text."""
        return 1

    def eos_id(self) -> int:
        """Ends a text."""
        return 2


def make_model(seed: int, mesh: Mesh | None = None) -> qwen3.Qwen3:
    """A model with random weights, placed as its own annotations say.

    Args:
        seed: of the weights.
        mesh: with axes ``fsdp`` and ``tp``; ``None`` for one device.

    Returns:
        The model.
    """

    @nnx.jit
    def create() -> qwen3.Qwen3:
        model = qwen3.Qwen3(MODEL, rngs=nnx.Rngs(seed))
        params = nnx.state(model, nnx.Param)
        # tunix leaves MLPs at zero for a checkpoint to fill. From there they have no gradient.
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        leaves = [
            jax.random.normal(key, leaf.shape, leaf.dtype) * 0.05 if leaf.ndim > 1 else leaf
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        params = jax.tree.unflatten(treedef, leaves)
        if mesh is not None:
            params = jax.lax.with_sharding_constraint(params, nnx.get_partition_spec(params))
        nnx.update(model, params)
        return model

    with within(mesh):
        return create()


@contextlib.contextmanager
def within(mesh: Mesh | None) -> Iterator[None]:
    """The context from which tunix reads the mesh; `jax.set_mesh` does not reach it."""
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(mesh)
        yield


def place_state(trainer: tunix.PeftTrainer) -> None:
    """Tells tunix where the optimizer's state belongs. It moves it there before the first step.

    By itself tunix follows the annotations of the state, which mirror those of the weights: a core
    lies on one of the two mesh axes of its weight and is repeated along the other. Here it is
    divided along both, so that a device holds its share of the state and no more.

    Args:
        trainer: that has not trained yet; for GRPO, ``RLCluster.actor_trainer``.
    """
    optimizer = trainer.optimizer
    shardings = lro.state_shardings(optimizer.tx, nnx.state(trainer.model, nnx.Param))

    def annotate(variable: nnx.Variable, sharding: Any) -> None:
        spec = getattr(sharding, "spec", None)  # none on a single device
        if spec is not None:
            variable.set_metadata(out_sharding=tuple(spec))

    jax.tree.map(
        annotate, optimizer.opt_state, shardings, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
