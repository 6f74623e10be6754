"""Byte-level data: a batch depends on the seed and the step alone, and not on what is held out."""

import numpy as np
import pytest

from running import data


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    # Every two-byte number once: a window says where it comes from.
    text = np.arange(5000, dtype=">u2").tobytes()
    return data.split(text, length=32)


def test_batches_are_pinned_down_by_seed_and_step(corpus):
    again = data.split(corpus.train.tobytes() + corpus.validation.tobytes(), length=32)
    first = corpus.batch(3, 7, 4)
    assert (first.shape, first.dtype) == ((4, 33), np.int32)
    for step in (0, 500, 2):  # whatever was read in between
        corpus.batch(3, step, 4)
    np.testing.assert_array_equal(corpus.batch(3, 7, 4), first)
    np.testing.assert_array_equal(again.batch(3, 7, 4), first)
    assert not np.array_equal(corpus.batch(4, 7, 4), first)
    assert not np.array_equal(corpus.batch(3, 8, 4), first)


def test_windows_are_contiguous_text(corpus):
    text = corpus.train.tobytes()
    for window in corpus.batch(0, 5, 8):
        assert window.astype(np.uint8).tobytes() in text


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_predicts_no_byte_twice(corpus, epoch):
    size = 7  # does not divide the epoch
    first = epoch * corpus.windows
    batches = [corpus.batch(1, s, size) for s in range((first + corpus.windows) // size + 1)]
    windows = np.concatenate(batches)[first : first + corpus.windows]
    text = corpus.train.tobytes()
    starts = np.array([text.index(window.astype(np.uint8).tobytes()) for window in windows])
    assert np.all(np.diff(np.sort(starts)) == corpus.length)
    assert not np.array_equal(starts, np.sort(starts))


def test_epochs_differ(corpus):
    assert not np.array_equal(
        corpus.batch(1, 0, corpus.windows), corpus.batch(1, 1, corpus.windows)
    )


def test_validation_is_fixed_and_apart_from_training(corpus):
    whole = corpus.train.tobytes() + corpus.validation.tobytes()
    assert whole == np.arange(5000, dtype=">u2").tobytes()
    first, again = (list(corpus.validation_batches(4)) for _ in range(2))
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(again))
    held_out = corpus.validation.tobytes()
    for window in np.concatenate(first):
        assert window.astype(np.uint8).tobytes() in held_out
    assert all(len(batch) <= 4 for batch in first)
    # The last training window there can be ends where the training part ends.
    for seed in range(50):
        for window in corpus.batch(seed, 0, corpus.windows):
            assert window.astype(np.uint8).tobytes() in corpus.train.tobytes()


def test_validation_windows_do_not_depend_on_the_batch_size(corpus):
    windows = [np.concatenate(list(corpus.validation_batches(n, limit=9))) for n in (1, 4, 100)]
    assert len(windows[0]) == 9
    np.testing.assert_array_equal(windows[0], windows[1])
    np.testing.assert_array_equal(windows[0], windows[2])


def test_the_shortest_text():
    corpus = data.split(bytes(range(97)), length=32)
    assert corpus.windows == 1
    assert len(list(corpus.validation_batches(4))) == 1
    with pytest.raises(
        ValueError, match=r"has 96 bytes, which is too short for windows of 32: .*97"
    ):
        data.split(bytes(range(96)), length=32)


def test_fingerprints_tell_texts_apart(corpus):
    other = data.split(b"x" + corpus.train.tobytes()[1:] + corpus.validation.tobytes(), length=32)
    assert other.fingerprint != corpus.fingerprint


def test_files_are_joined_in_order(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    assert data.read_files([tmp_path / "b", tmp_path / "a"]) == b"b\na"


def test_the_standard_library_is_the_default_text():
    text = data.standard_library(limit=300_000)
    assert len(text) == 300_000
    assert text == data.standard_library(limit=400_000)[:300_000]
    assert b"import " in text
