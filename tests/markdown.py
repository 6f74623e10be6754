"""The code blocks of a Markdown page, and running them as their reader would."""

import contextlib
import dataclasses
import io
import re
from typing import Any

import jax

_BLOCK = re.compile(
    r"(?P<mark><!-- not run: .+? -->\n)?```python\n(?P<code>.*?)```\n"
    r"(?:\n```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A Python block of a page.

    Attributes:
        code: its text.
        line: where it starts in the page.
        output: the text block right behind it, which is what it prints; None if there is none.
        is_run: whether no comment ``<!-- not run: reason -->`` stands right before it.
    """

    code: str
    line: int
    output: str | None
    is_run: bool


def python_blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [
        Block(
            code=found["code"],
            line=page.count("\n", 0, found.start("code")),
            output=found["output"],
            is_run=found["mark"] is None,
        )
        for found in _BLOCK.finditer(page)
    ]


def run(block: Block, names: dict[str, Any], title: str = "page") -> str:
    """Runs a block under usual dtype promotion, as readers do, and returns what it prints."""
    # Line numbers of a traceback are the page's.
    code = compile("\n" * block.line + block.code, title, "exec")
    printed = io.StringIO()
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()
