"""What the examples' command lines have in common: types of values, and where output may go."""

import argparse
import math
import os
import pathlib
from collections.abc import Callable, Collection
from typing import NoReturn

from running.errors import UserError
from running.placement import AXES


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`, prints its description as it is, and takes whole names."""

    def __init__(self, description: str | None):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing and exiting."""
        raise UserError(f"{message} (--help lists the options)")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else count(text)


def number(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")


def positive(text: str) -> float:
    """A finite number above 0."""
    if value := number(text):
        return value
    raise argparse.ArgumentTypeError(f"{text} must be above 0")


def rank(text: str) -> int | float:
    """A rank, or a share of the smaller matrix side."""
    try:
        value: int | float = int(text)
        valid = value >= 1
    except ValueError:
        value = number(text)
        valid = 0 < value <= 1
    if valid:
        return value
    raise argparse.ArgumentTypeError(
        f"{text} is not a rank; give an integer of at least 1, or a fraction of the smaller matrix "
        "side such as 0.25"
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """Sizes of mesh axes, such as fsdp=4,tp=2."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text} is no mesh; give sizes of {', '.join(AXES)}, such as fsdp=4,tp=2"
            )
        sizes[name] = int(size)
    return sizes


def process(text: str) -> tuple[str, int, int]:
    """The address of the first process, their count, and this one's number."""
    address, *numbers = text.split(",")
    if ":" in address and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        count, number = map(int, numbers)
        if number < count:
            return address, count, number
    raise argparse.ArgumentTypeError(
        f"{text} is no process; give the address of the first one, how many there are, and the "
        "number of this one from 0, such as node0:1234,2,0"
    )


def named_rate(names: Collection[str]) -> Callable[[str], tuple[str | None, float]]:
    """Reads LR, or NAME=LR with one of ``names``."""

    def read(text: str) -> tuple[str | None, float]:
        name, _, value = text.rpartition("=")
        if name and name not in names:
            raise argparse.ArgumentTypeError(f"{text} names none of {', '.join(names)}")
        return name or None, positive(value)

    return read


def check_directory(flag: str, path: pathlib.Path | None) -> None:
    """Makes sure that a directory is there or can be made.

    Args:
        flag: the option that names it.
        path: the directory, if the option was given.

    Raises:
        UserError: if a file is in its place, or nothing may be written there.
    """
    if path is None:
        return
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"{flag} {path}: '{nearest}' is not a directory, choose another")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{flag} {path}: '{nearest}' may not be written to, choose another")


def flag_of(option: str) -> str:
    """How a user types an option."""
    return "--" + option.replace("_", "-")


def log_path(args: argparse.Namespace, name: str) -> pathlib.Path | None:
    """Where the metrics of one run go.

    Raises:
        UserError: if another run's metrics are there.
    """
    if args.log_dir is None:
        return None
    path = args.log_dir / f"{name}.jsonl"
    if path.exists() and not args.resume:
        raise UserError(f"'{path}' exists already: choose another --log-dir")
    return path
