"""Text as bytes, and batches that are a pure function of a seed and a step.

A run that stops after 137 steps needs no saved iterator: ``corpus.batch(seed, 137, size)`` is what
comes next. The last part of the text is held out and never trained on.
"""

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text in two parts, read in windows of ``length + 1`` bytes (inputs and shifted targets).

    Attributes:
        train: the bytes to train on.
        validation: the bytes held out.
        length: how many bytes a window predicts.
    """

    train: np.ndarray
    validation: np.ndarray
    length: int

    @property
    def windows(self) -> int:
        """How many training windows one epoch has. One window's worth is left for the shift."""
        return len(self.train) // self.length - 1

    @property
    def fingerprint(self) -> str:
        """A hash of both parts, by which a resumed run knows its data."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"|" + self.validation.tobytes())
        return digest.hexdigest()[:16]

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """The training batch of one step.

        Every epoch cuts the text at another offset and shuffles the windows, so that within an
        epoch no byte is predicted twice.

        Args:
            seed: of the shuffling.
            step: counted from 0.
            size: how many windows.

        Returns:
            Bytes as int32, ``(size, length + 1)``.
        """
        starts = []
        for index in range(step * size, (step + 1) * size):
            epoch, position = divmod(index, self.windows)
            offset, order = _shuffle(seed, epoch, self.windows, self.length)
            starts.append(offset + self.length * int(order[position]))
        return _cut(self.train, starts, self.length)

    def validation_batches(self, size: int, limit: int = 256) -> Iterator[np.ndarray]:
        """The fixed windows to validate on, evenly spaced over the held-out part.

        Args:
            size: how many windows a batch has at most.
            limit: how many windows in all, at most.

        Yields:
            Bytes as int32, ``(size, length + 1)``; the last batch may be smaller.
        """
        available = (len(self.validation) - 1) // self.length
        chosen = np.linspace(0, available - 1, min(available, limit)).astype(int)
        for first in range(0, len(chosen), size):
            starts = [int(i) * self.length for i in chosen[first : first + size]]
            yield _cut(self.validation, starts, self.length)


@functools.lru_cache(maxsize=2)
def _shuffle(seed: int, epoch: int, windows: int, length: int) -> tuple[int, np.ndarray]:
    generator = np.random.default_rng((seed, epoch))
    return int(generator.integers(length)), generator.permutation(windows)


def _cut(text: np.ndarray, starts: Sequence[int], length: int) -> np.ndarray:
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)


def split(text: bytes, length: int, held_out: float = 0.05) -> Corpus:
    """Holds out the tail of a text.

    Args:
        text: all of it.
        length: how many bytes a window predicts.
        held_out: the share of the text that is kept for validation, at least one window.

    Returns:
        The `Corpus`.

    Raises:
        ValueError: if the text is too short for one window in each part.
    """
    array = np.frombuffer(text, np.uint8)
    tail = max(round(len(array) * held_out), length + 1)
    corpus = Corpus(array[:-tail], array[-tail:], length)
    if len(array) <= tail or corpus.windows < 1:
        raise ValueError(
            f"the text has {len(array)} bytes, which is too short for windows of {length}: give "
            f"at least {3 * length + 1} bytes or a shorter --seq-len"
        )
    return corpus


def read_files(paths: Sequence[str | pathlib.Path]) -> bytes:
    """The contents of the files, one after the other."""
    return b"\n".join(pathlib.Path(path).read_bytes() for path in paths)


def standard_library(limit: int = 4_000_000) -> bytes:
    """Source text of the running interpreter's standard library.

    The files come in an order that is fixed by a hash of their names, so that both ends of the
    text are a fair sample of it and every run of one Python version sees the same text.

    Args:
        limit: where to stop, in bytes.

    Returns:
        Whole files, as bytes, cut at ``limit``.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not _SKIPPED.intersection(name.parts)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    text = bytearray()
    for name in names:
        if len(text) >= limit:
            break
        text += (root / name).read_bytes() + b"\n"
    return bytes(text[:limit])
