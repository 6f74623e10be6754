"""Packed texts: none is lost, none sees another, and the loss is the mean over learned tokens."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from huggingface import packing
from huggingface.chat import Example
from model.decoder import DecoderConfig, functional
from running.errors import UserError


def example(tokens, answer: int, line: str = "a:1") -> Example:
    """A text whose last ``answer`` tokens are learned."""
    tokens = np.asarray(tokens, np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(tokens) - answer, line)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 12, 30)
    return [example(generator.integers(1, 50, n), answer=1 + n // 3) for n in lengths]


@hypothesis.given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_text_is_in_one_row_that_holds_it(lengths):
    rows = packing.pack(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    used = [sum(lengths[index] for index in row) for row in rows]
    assert max(used) <= 20
    # Two rows that would fit into one are not left apart.
    assert len(rows) == 1 or sum(sorted(used)[:2]) > 20


def test_rows_hold_shifted_texts(examples):
    batch = packing.fill(examples, [[0, 3], [], [7]], 24)
    first, second = examples[0], examples[3]
    at = np.s_[0, first.length : first.length + second.length]
    np.testing.assert_array_equal(batch["tokens"][at], second.tokens[:-1])
    np.testing.assert_array_equal(batch["targets"][at], second.tokens[1:])
    np.testing.assert_array_equal(batch["positions"][at], np.arange(second.length))
    np.testing.assert_array_equal(batch["weights"][at], second.learned[1:])
    assert set(batch["segments"][0].tolist()) == {0, 1, 2}
    assert not batch["segments"][1].any()
    assert sum(np.count_nonzero(batch["weights"][row]) for row in (0, 2)) == sum(
        np.count_nonzero(examples[i].learned) for i in (0, 3, 7)
    )


def test_packed_logits_are_those_of_each_text_alone(examples):
    config = DecoderConfig.tiny(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        qk_norm=True,
    )
    init, apply = functional(config)
    params = jax.jit(init)(jax.random.key(0))
    apply = jax.jit(apply)
    rows = packing.pack([e.length for e in examples], 24)[:3]
    batch = packing.fill(examples, rows, 24)
    packed = apply(params, *(jnp.asarray(batch[k]) for k in ("tokens", "positions", "segments")))
    for row, indices in enumerate(rows):
        start = 0
        assert len(indices) > 1
        for index in indices:
            length = examples[index].length
            alone = np.zeros((3, 24), np.int32)  # of the same shape: one compilation
            alone[0, :length] = examples[index].tokens[:-1]
            expected = apply(params, jnp.asarray(alone))[0, :length]
            np.testing.assert_allclose(packed[row, start : start + length], expected, atol=1e-5)
            start += length


def test_batches_are_a_function_of_seed_and_step(examples):
    data = packing.PackedData(examples[:25], examples[25:], 16)
    rows = len(data.rows)
    batches = [data.batch(3, step, 4) for step in range(2 * rows)]
    again = packing.PackedData(examples[:25], examples[25:], 16)
    for name, array in again.batch(3, 5, 4).items():
        np.testing.assert_array_equal(array, batches[5][name])
    assert again.fingerprint == data.fingerprint
    assert not np.array_equal(data.batch(4, 5, 4)["tokens"], batches[5]["tokens"])
    # Every text once an epoch, in another order in the next.
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    first, second = tokens[:rows], tokens[rows : 2 * rows]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    assert np.count_nonzero(first) == sum(e.length for e in examples[:25])


def test_weights_average_over_the_whole_batch(examples):
    """Micro-batches with few answers must not count as much as those with many."""
    data = packing.PackedData(examples, examples, 16)
    batch = data.batch(0, 0, 4)
    losses = np.random.default_rng(1).random(batch["weights"].shape)
    expected = losses[batch["weights"] > 0].mean()
    for parts in (1, 2, 4):
        weighted = np.reshape(losses * batch["weights"], (parts, -1, 16))
        micro = weighted.sum((1, 2)) / (4 // parts)
        np.testing.assert_allclose(micro.mean(), expected, rtol=1e-6)


def test_validation_batches_hold_everything_in_one_size(examples):
    data = packing.PackedData(examples, examples[:9], 16)
    batches = list(data.validation_batches(3))
    assert all(batch["tokens"].shape == (3, 16) for batch in batches)
    assert sum(batch["weights"].sum() for batch in batches) == sum(
        np.count_nonzero(e.learned[1:]) for e in examples[:9]
    )


def test_fingerprints_tell_data_apart(examples):
    data = packing.PackedData(examples, examples[:2], 16)
    changed = [example(examples[0].tokens, answer=1), *examples[1:]]
    others = [
        packing.PackedData(examples[1:], examples[:2], 16),
        packing.PackedData(examples, examples[:3], 16),
        packing.PackedData(examples, examples[:2], 17),
        packing.PackedData(changed, examples[:2], 16),
    ]
    assert data.fingerprint not in {other.fingerprint for other in others}


def test_an_example_that_is_too_long_is_named(examples):
    long = example(range(20), 3, "chat.jsonl:17")
    with pytest.raises(UserError, match=r"chat\.jsonl:17: 19 tokens do not fit into --seq-len 16"):
        packing.PackedData([*examples, long], [], 16)


def test_holding_out(examples):
    train, validation = packing.hold_out(examples, 0.1)
    assert (len(train), len(validation)) == (27, 3)
    assert {id(e) for e in train} | {id(e) for e in validation} == {id(e) for e in examples}
    assert len(packing.hold_out(examples[:2])[1]) == 1
    with pytest.raises(UserError, match="a:1 is the only example"):
        packing.hold_out(examples[:1])
