"""The language model that gradients are compressed on: a byte-level decoder and its text."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from benchmarks import harness  # noqa: F401  The examples are found through it.
from model import decoder
from running import data


@dataclasses.dataclass(frozen=True)
class Size:
    """The task.

    Attributes:
        width: of the residual stream.
        layers: number of blocks.
        length: bytes a window.
        batch: windows a step.
        steps: updates a run.
        text: bytes of text.
    """

    width: int = 64
    layers: int = 2
    length: int = 64
    batch: int = 16
    steps: int = 400
    text: int = 2_000_000


@functools.cache
def make_task(size: Size) -> tuple[Callable, Callable, data.Corpus]:
    """Init, loss and text."""
    config = decoder.DecoderConfig.tiny(
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 32),
        num_key_value_heads=max(1, size.width // 32),
        tie_word_embeddings=False,
    )
    init, apply = decoder.functional(config)

    def loss(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return decoder.next_token_loss(logits, tokens[:, 1:])

    corpus = data.split(data.standard_library(size.text), size.length)
    return jax.jit(init), jax.jit(loss), corpus
