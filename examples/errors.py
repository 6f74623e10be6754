"""What an example says instead of a traceback."""


class UserError(Exception):
    """Something only the user can put right. The message says what was wrong and what to do."""


class Interruption(Exception):  # noqa: N818 (not an error)
    """The user pressed Ctrl-C. The message says what has been kept."""


def one_line(error: BaseException) -> str:
    """The message of an exception, however long, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
