"""Several short texts in a row of a batch, none of which sees another.

A row holds predictions: token, target, position, the number of its text (0 where nothing is), and
the weight of the loss. Batches are a pure function of a seed and a step, as in `data`.
"""

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from huggingface.chat import Example
from running.errors import UserError

Batch = dict[str, np.ndarray]
"""``tokens``, ``targets``, ``positions``, ``segments`` (int32) and ``weights`` (float32), each
``(rows, length)``."""


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distributes texts over rows: the longest first, each where it leaves the least room.

    Args:
        lengths: of the texts, each at most ``room``.
        room: of a row.

    Returns:
        For each row the indices of its texts.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # the room left and the row, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect.bisect_left(free, (lengths[index], -1))
        if slot < len(free):
            left, row = free.pop(slot)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (left - lengths[index], row))
    return rows


def _empty(rows: int, length: int) -> Batch:
    batch = {
        name: np.zeros((rows, length), np.int32)
        for name in ("tokens", "targets", "positions", "segments")
    }
    return batch | {"weights": np.zeros((rows, length), np.float32)}


def fill(examples: Sequence[Example], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Writes texts into rows.

    Args:
        examples: the texts.
        rows: which of them go into each row, from `pack`.
        length: of a row.

    Returns:
        A batch in which each learned token has weight 1.
    """
    batch = _empty(len(rows), length)
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, 1):
            example = examples[index]
            part = np.s_[row, start : start + example.length]
            batch["tokens"][part] = example.tokens[:-1]
            batch["targets"][part] = example.tokens[1:]
            batch["positions"][part] = np.arange(example.length)
            batch["segments"][part] = segment
            batch["weights"][part] = example.learned[1:]
            start += example.length
    return batch


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


@dataclasses.dataclass(frozen=True)
class PackedData:
    """Packed examples to train and to validate on.

    Attributes:
        train: the examples to train on.
        validation: those held out.
        length: of a row.
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    length: int

    def __post_init__(self) -> None:
        for example in (*self.train, *self.validation):
            if example.length > self.length:
                raise UserError(
                    f"{example.line}: {example.length} tokens do not fit into --seq-len "
                    f"{self.length}: make it longer, or leave such examples out with --drop-long"
                )

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """Which examples share a row; the same in every epoch."""
        return pack([example.length for example in self.train], self.length)

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, by which a resumed run knows its data."""
        digest = hashlib.sha256(f"{self.length} {len(self.train)}".encode())
        for example in (*self.train, *self.validation):
            digest.update(example.tokens.tobytes() + b"|" + example.learned.tobytes() + b"|")
        return digest.hexdigest()[:16]

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """The training batch of one step.

        Weights are scaled so that the mean over rows of the weighted sums of losses is the mean
        over the batch's learned tokens, however the batch is cut into micro-batches.

        Args:
            seed: of the order of rows, which is another in each epoch.
            step: counted from 0.
            size: how many rows.

        Returns:
            The batch.
        """
        chosen = []
        for index in range(step * size, (step + 1) * size):
            epoch, position = divmod(index, len(self.rows))
            chosen.append(self.rows[_order(seed, epoch, len(self.rows))[position]])
        batch = fill(self.train, chosen, self.length)
        batch["weights"] *= size / np.sum(batch["weights"])
        return batch

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """All that is held out, in batches of one size, of which the last may have empty rows.

        Args:
            size: how many rows.

        Yields:
            Batches in which each learned token has weight 1.
        """
        rows = pack([example.length for example in self.validation], self.length)
        rows += [[] for _ in range(-len(rows) % size)]
        for first in range(0, len(rows), size):
            yield fill(self.validation, rows[first : first + size], self.length)


def hold_out(
    examples: Sequence[Example], share: float = 0.05
) -> tuple[list[Example], list[Example]]:
    """Sets examples aside for validation, the same ones at any seed.

    Args:
        examples: at least two.
        share: of them; at least one is held out.

    Returns:
        Those to train on, and those to validate on.

    Raises:
        UserError: if there is only one.
    """
    if len(examples) < 2:
        raise UserError(
            f"{examples[0].line} is the only example: give more, or others to validate on with "
            "--validation"
        )
    number = max(1, round(share * len(examples)))
    chosen = set(np.random.default_rng(0).permutation(len(examples))[:number].tolist())
    return (
        [example for i, example in enumerate(examples) if i not in chosen],
        [example for i, example in enumerate(examples) if i in chosen],
    )
