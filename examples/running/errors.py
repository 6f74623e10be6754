"""What an example says instead of a traceback."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something only the user can put right. The message says what was wrong and what to do."""


class Interruption(Exception):  # noqa: N818 (not an error)
    """The user pressed Ctrl-C. The message says what has been kept."""


def one_line(error: BaseException) -> str:
    """The message of an exception, however long, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def exit_code(name: str, script: Callable[[], object]) -> int:
    """Runs a script, and says in one line why it stopped.

    Args:
        name: of the script.
        script: does the work.

    Returns:
        The exit code: 2 for what the user has to put right, 130 after Ctrl-C.
    """
    try:
        script()
    except (UserError, ImportError) as error:
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except (Interruption, KeyboardInterrupt) as stop:
        message = one_line(stop) if isinstance(stop, Interruption) else "interrupted"
        print(f"{name}: {message}", file=sys.stderr)
        return 130
    return 0
