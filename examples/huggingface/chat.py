"""Conversations and prompts from JSON lines, as tokens of which only the answers are learned.

A line is one of::

  {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
  {"prompt": "2 + 2 = ", "completion": "4"}
  {"instruction": "Add.", "input": "2, 2", "output": "4"}

Conversations and instructions are written out by the tokenizer's chat template. A prompt with its
completion is taken as it is, with the end-of-text token behind it.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from running.errors import UserError, one_line

_KEYS = ({"messages"}, {"prompt", "completion"}, {"instruction", "input", "output"})
_FORMS = (
    '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A text to learn from.

    Attributes:
        tokens: int32, ``(n,)``.
        learned: for each token whether it is part of an answer, ``(n,)``.
        line: where it stands, for messages.
    """

    tokens: np.ndarray
    learned: np.ndarray
    line: str

    @property
    def length(self) -> int:
        """How many tokens are predicted: all but the first."""
        return len(self.tokens) - 1


def load_tokenizer(directory: pathlib.Path) -> Any:
    """The tokenizer of a checkpoint directory; nothing is downloaded.

    Raises:
        ImportError: if transformers is not installed.
        UserError: if there is none.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "the tokenizer needs transformers: pip install 'lowrank-optax[llm]'"
        ) from error
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever its many parsers raise
        raise UserError(
            f"'{directory}' has no tokenizer that transformers can load "
            f"({one_line(error)[:200]}): copy tokenizer.json and tokenizer_config.json there"
        ) from error


def read_examples(path: pathlib.Path, tokenizer: Any) -> list[Example]:
    """Reads a file of JSON lines.

    Args:
        path: the file. Empty lines are skipped.
        tokenizer: of the model.

    Returns:
        The examples in the order of the lines. A conversation that its template does not write
        out the same from turn to turn gives one example for each answer.

    Raises:
        UserError: that names the file and the line, if one cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"'{path}' cannot be read ({one_line(error)}): give a UTF-8 text file of JSON lines"
        ) from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                examples += _examples_of(line, tokenizer, where)
            except _Unfit as error:
                raise UserError(f"{where}: {error}") from error
    if not examples:
        raise UserError(f"'{path}' has no examples: give one JSON object a line, as {_FORMS}")
    return examples


class _Unfit(Exception):  # noqa: N818 (an inner signal)
    """Why a line cannot be used, and what would do."""


def _examples_of(line: str, tokenizer: Any, where: str) -> list[Example]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise _Unfit(f"no JSON ({one_line(error)}): write one object on one line") from error
    form = None
    if isinstance(content, dict):
        required = [keys - {"input"} for keys in _KEYS]
        fitting = [i for i, keys in enumerate(required) if keys <= content.keys()]
        form = fitting[0] if fitting else None
    if form is None:
        found = f"keys {', '.join(content)}" if isinstance(content, dict) else "no object"
        raise _Unfit(f"{found or 'no keys'}; expected {_FORMS}")
    if form == 1:
        pieces = [_complete(content, tokenizer)]
    else:
        messages = content["messages"] if form == 0 else _instruct(content)
        pieces = _converse(messages, tokenizer)
    return [_tokenize(piece, tokenizer, where, special=form == 1) for piece in pieces]


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content[key]
    if not isinstance(value, str):
        raise _Unfit(f"{key} is {type(value).__name__}, expected text")
    return value


def _complete(content: Mapping[str, Any], tokenizer: Any) -> list[tuple[str, bool]]:
    if tokenizer.eos_token is None:
        raise _Unfit(
            "the tokenizer has no end-of-text token to end a completion with: use messages"
        )
    completion = _text(content, "completion")
    if not completion:
        raise _Unfit("completion is empty: there is nothing to learn")
    return [(_text(content, "prompt"), False), (completion + tokenizer.eos_token, True)]


def _instruct(content: Mapping[str, Any]) -> list[dict[str, str]]:
    more = _text(content, "input") if content.get("input") else ""
    question = "\n\n".join(part for part in (_text(content, "instruction"), more) if part)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(content, "output")},
    ]


def _converse(messages: Any, tokenizer: Any) -> list[list[tuple[str, bool]]]:
    """Pieces of text, answers marked; more than one list where turns change when others follow."""
    if not isinstance(messages, list) or not messages:
        raise _Unfit('messages is not a list of {"role": ..., "content": ...}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _Unfit(f'message {number} is not {{"role": ..., "content": ...}}')
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise _Unfit(
                f"message {number} has role {message['role']!r}, expected 'system', 'user', "
                "'assistant' or 'tool'"
            )
        _text(message, "content")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise _Unfit("no message has the role 'assistant': there is nothing to learn")
    if getattr(tokenizer, "chat_template", None) is None:
        raise _Unfit(
            "the tokenizer has no chat template: take the model's chat or instruct version, or "
            "give prompt and completion"
        )

    def written(count: int, answering: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=answering
            )
        except Exception as error:  # templates raise what they like
            raise _Unfit(f"the chat template refuses it: {one_line(error)}") from error

    spans = [(written(i, answering=True), written(i + 1)) for i in answers]
    for before, after in spans:
        if not after.startswith(before):
            raise _Unfit(
                "the chat template does not write an answer behind its own generation prompt: give "
                "prompt and completion"
            )
    whole = [text for span in spans for text in span]
    if all(b.startswith(a) for a, b in itertools.pairwise(whole)):
        added = [b[len(a) :] for a, b in itertools.pairwise(["", *whole])]
        return [list(zip(added, itertools.cycle((False, True)), strict=False))]
    return [[(before, False), (after[len(before) :], True)] for before, after in spans]


def _tokenize(
    pieces: Sequence[tuple[str, bool]], tokenizer: Any, where: str, special: bool
) -> Example:
    """Piece by piece, as at inference, where the prompt is tokenized before there is an answer."""
    tokens, learned = [], []
    for number, (text, is_answer) in enumerate(pieces):
        encoded = tokenizer(text, add_special_tokens=special and number == 0)["input_ids"]
        if special and number == 0 and encoded and encoded[-1] == tokenizer.eos_token_id:
            encoded = encoded[:-1]  # some tokenizers end every text
        tokens += encoded
        learned += [is_answer] * len(encoded)
    # The first token is predicted from nothing.
    if not any(learned[1:]):
        raise _Unfit("the answer has no tokens that something stands before")
    return Example(np.asarray(tokens, np.int32), np.asarray(learned), where)
