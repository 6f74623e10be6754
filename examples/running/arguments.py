"""What the examples' command lines have in common: types of values, options, and checks."""

import argparse
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

from running.errors import UserError
from running.placement import AXES

Value = TypeVar("Value")

Add: TypeAlias = Callable[..., argparse.Action]
"""``add_argument`` of a parser or of a group."""


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


def by_name(
    given: Iterable[tuple[str | None, Value]], usual: Mapping[str, Value]
) -> dict[str, Value]:
    """What was given for each name, or for all of them, or what is usual.

    Args:
        given: pairs of a name and its value; without a name the value is for all others.
        usual: by name.

    Returns:
        A value for every name in ``usual``.
    """
    chosen = dict(given)
    return {name: chosen.get(name, chosen.get(None, value)) for name, value in usual.items()}


def add_optimizers(add: Add, names: Collection[str], usual: Sequence[str]) -> None:
    """Which optimizers are compared.

    Args:
        add: of the group.
        names: what there is.
        usual: those trained unless others are named.
    """
    shown = "all" if len(usual) == len(names) else " ".join(usual)
    add(
        "--optimizer",
        nargs="+",
        choices=names,
        default=usual,
        metavar="NAME",
        help=f"one or more of {', '.join(names)}, trained in turn ({shown})",
    )


def add_learning_rates(add: Add, names: Collection[str], what: str = "learning rate") -> None:
    """One learning rate for all optimizers, or one for each."""
    add(
        "--lr",
        type=named_rate(names),
        nargs="+",
        default=[],
        metavar="LR",
        help=f"{what}; NAME=LR sets one optimizer's (each one's own)",
    )


def add_subspace(add: Add, usual_rank: int | float, usual_interval: int) -> None:
    """The subspace that a low-rank optimizer works in."""
    add("--rank", type=rank, help=f"integer, or share of the smaller side ({usual_rank})")
    add("--refresh-every", type=count, help=f"steps a basis is kept ({usual_interval})")
    add("--scale", type=positive, help="factor on projected updates (the optimizer's own)")


def add_step_sizes(add: Add, usual_warmup: str) -> None:
    """Weight decay, clipping, and the learning rate's way through the run."""
    add("--weight-decay", type=number, default=0.0, help="decoupled (%(default)s)")
    add("--clip", type=number, default=1.0, help="largest gradient norm, 0 for any (%(default)s)")
    add("--warmup", type=count_or_zero, help=f"steps ({usual_warmup})")
    add("--schedule", choices=("cosine", "constant"), default="cosine", help="after the warm-up")


def add_batches(add: Add, rows: str) -> None:
    """How many rows an update sees, and in how many parts."""
    add("--batch-size", type=count, default=8, help=f"{rows} an update (%(default)s)")
    add("--accumulate", type=count, default=1, help="micro-batches an update (%(default)s)")


def add_mesh(add: Add) -> None:
    """The mesh of devices."""
    add(
        "--mesh",
        type=mesh_sizes,
        metavar="AXIS=SIZE,...",
        help="sizes of data, fsdp and tp, such as fsdp=4,tp=2 (one device)",
    )


def add_output(add: Add, steps: str, usual_interval: int, logged: str) -> None:
    """Where the checkpoints and the logs of several runs go.

    Args:
        add: of the group.
        steps: what a run counts.
        usual_interval: how many of them lie between two checkpoints.
        logged: what the log has.
    """
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="a sub-directory per optimizer")
    add("--checkpoint-every", type=count, help=f"{steps} between checkpoints ({usual_interval})")
    add("--resume", action="store_true", help="go on from the latest checkpoints in DIR")
    add("--log-dir", type=pathlib.Path, metavar="DIR", help=f"{logged} as JSON lines")


def check_optimizers(args: argparse.Namespace) -> None:
    """Refuses an optimizer that is named twice, and a learning rate of one that is not trained.

    Raises:
        UserError: with the first one.
    """
    if len(set(args.optimizer)) < len(args.optimizer):
        raise UserError("--optimizer names an optimizer twice: name each once")
    for name, _ in args.lr:
        if name is not None and name not in args.optimizer:
            raise UserError(f"--lr {name}=... has no effect: add {name} to --optimizer")


def refuse_on(args: argparse.Namespace, options: Iterable[str], names: str, remedy: str) -> None:
    """Refuses options that have no effect on the optimizers that are trained.

    Args:
        args: what the parser returned.
        options: that have no effect on them.
        names: of the optimizers.
        remedy: what to do other than leave the option out.

    Raises:
        UserError: if one of the options was given.
    """
    for option in options:
        if getattr(args, option):
            raise UserError(f"{flag_of(option)} has no effect on {names}: leave it out or {remedy}")


def refuse_alone(
    args: argparse.Namespace, options: Iterable[str], needed: str, value: str = ""
) -> None:
    """Refuses options that have no effect without another one.

    Args:
        args: what the parser returned.
        options: that have no effect alone.
        needed: the other one.
        value: what a user types after it.

    Raises:
        UserError: if one of the options was given, and the other one was not.
    """
    for option in options:
        if getattr(args, option) and not getattr(args, needed):
            add = f"{flag_of(needed)} {value}".strip()
            raise UserError(f"{flag_of(option)} has no effect alone: add {add}")


def check_micro_batches(args: argparse.Namespace) -> None:
    """Refuses a batch that does not divide into micro-batches.

    Raises:
        UserError: if it does not.
    """
    if args.batch_size % args.accumulate:
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into --accumulate {args.accumulate} "
            "equal micro-batches: change one of them"
        )


def check_output(args: argparse.Namespace) -> None:
    """Makes sure that the output of `add_output` can be written, and is asked for.

    Raises:
        UserError: if a directory cannot be used, or an option has no effect.
    """
    for option in ("checkpoint", "log_dir"):
        check_directory(flag_of(option), getattr(args, option))
    refuse_alone(args, ("resume", "checkpoint_every"), "checkpoint", "DIR")


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
