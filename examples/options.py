"""The command line of `finetune_lm.py`: its options, and which of them contradict each other."""

import argparse
import math
import os
import pathlib
from typing import NoReturn

from decoder import DecoderConfig
from errors import UserError
from optimizers import RECIPES, Options
from placement import AXES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")


def _positive(text: str) -> float:
    if value := _number(text):
        return value
    raise argparse.ArgumentTypeError(f"{text} must be above 0")


def _mesh(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text} is no mesh; give sizes of {', '.join(AXES)}, such as fsdp=4,tp=2"
            )
        sizes[name] = int(size)
    return sizes


def _process(text: str) -> tuple[str, int, int]:
    address, *numbers = text.split(",")
    if ":" in address and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        count, number = map(int, numbers)
        if number < count:
            return address, count, number
    raise argparse.ArgumentTypeError(
        f"{text} is no process; give the address of the first one, how many there are, and the "
        "number of this one from 0, such as node0:1234,2,0"
    )


def _rank(text: str) -> int | float:
    try:
        rank: int | float = int(text)
        valid = rank >= 1
    except ValueError:
        rank = _number(text)
        valid = 0 < rank <= 1
    if valid:
        return rank
    raise argparse.ArgumentTypeError(
        f"{text} is not a rank; give an integer of at least 1, or a fraction of the smaller matrix "
        "side such as 0.25"
    )


def _learning_rate(text: str) -> tuple[str | None, float]:
    name, _, value = text.rpartition("=")
    if name and name not in RECIPES:
        raise argparse.ArgumentTypeError(f"{text} names none of {', '.join(RECIPES)}")
    return name or None, _positive(value)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options, by group.

    Args:
        description: what the script does.

    Returns:
        A parser that raises `UserError`.
    """
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tiny, options = DecoderConfig.tiny(), Options()

    add = parser.add_argument_group("optimizer").add_argument
    add(
        "--optimizer",
        nargs="+",
        choices=RECIPES,
        default=["adamw", "galore"],
        metavar="NAME",
        help=f"one or more of {', '.join(RECIPES)}, trained in turn (adamw galore)",
    )
    add("--rank", type=_rank, help=f"integer, or share of the smaller side ({options.rank})")
    add("--refresh-every", type=_count, help=f"steps a basis is kept ({options.refresh_every})")
    add("--scale", type=_positive, help="factor on projected updates (the optimizer's own)")
    add(
        "--lr",
        type=_learning_rate,
        nargs="+",
        default=[],
        metavar="LR",
        help="peak learning rate; NAME=LR sets one optimizer's (each one's own)",
    )
    add("--weight-decay", type=_number, default=0.0, help="decoupled (%(default)s)")
    add("--clip", type=_number, default=1.0, help="largest gradient norm, 0 for any (%(default)s)")
    add("--warmup", type=_count_or_zero, help="steps (20, or a tenth of a short run)")
    add("--schedule", choices=("cosine", "constant"), default="cosine", help="after the warm-up")
    add(
        "--matrix-free",
        action="store_true",
        help="make no full gradient of a projected weight; AdamW is trained as ever",
    )
    add("--describe", action="store_true", help="first print what is projected")

    add = parser.add_argument_group("data and length").add_argument
    add("--data", nargs="+", metavar="FILE", help="text files (Python's standard library)")
    add("--steps", type=_count, default=400, help="updates (%(default)s)")
    add("--seq-len", type=_count, default=128, help="bytes a window (%(default)s)")
    add("--batch-size", type=_count, default=8, help="windows an update (%(default)s)")
    add("--accumulate", type=_count, default=1, help="micro-batches an update (%(default)s)")
    add("--eval-every", type=_count, help="updates between validations (a quarter of the run)")
    add("--seed", type=_count_or_zero, default=0, help="of weights and data order (%(default)s)")

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=_count, default=tiny.num_hidden_layers, help="(%(default)s)")
    add("--hidden", type=_count, default=tiny.hidden_size, help="(%(default)s)")
    add("--heads", type=_count, default=tiny.num_attention_heads, help="(%(default)s)")
    add("--kv-heads", type=_count, default=tiny.num_key_value_heads, help="(%(default)s)")
    add("--ffn", type=_count, default=tiny.intermediate_size, help="(%(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters and layers (%(default)s)",
    )
    add("--remat", action="store_true", help="recompute the layers in the backward pass")

    add = parser.add_argument_group("devices").add_argument
    add(
        "--mesh",
        type=_mesh,
        metavar="AXIS=SIZE,...",
        help="sizes of data, fsdp and tp, such as fsdp=4,tp=2 (one device)",
    )
    add(
        "--distributed",
        type=_process,
        nargs="?",
        const=(),
        metavar="HOST:PORT,COUNT,NUMBER",
        help="be one of several processes; TPU pods and Slurm know which (needs --mesh)",
    )

    add = parser.add_argument_group("output").add_argument
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="a sub-directory per optimizer")
    add("--checkpoint-every", type=_count, help="updates between checkpoints (100)")
    add("--resume", action="store_true", help="go on from the latest checkpoints in DIR")
    add("--log-dir", type=pathlib.Path, metavar="DIR", help="every step's metrics, as JSON lines")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuses options that contradict each other or would silently have no effect.

    Args:
        args: what the parser returned.

    Raises:
        UserError: with the first contradiction.
    """
    chosen = args.optimizer
    if len(set(chosen)) < len(chosen):
        raise UserError("--optimizer names an optimizer twice: name each once")
    named = [name for name, _ in args.lr]
    if len(set(named)) < len(named):
        raise UserError("--lr sets a learning rate twice: give LR once, NAME=LR once each")
    for name in named:
        if name is not None and name not in chosen:
            raise UserError(f"--lr {name}=... has no effect: add {name} to --optimizer")
    if not any(RECIPES[name].projected for name in chosen):
        for option in ("matrix_free", "rank", "refresh_every", "scale"):
            if getattr(args, option):
                raise UserError(
                    f"{_flag(option)} has no effect on {', '.join(chosen)}: leave it out or add a "
                    "low-rank optimizer"
                )
    if args.batch_size % args.accumulate:
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into --accumulate {args.accumulate} "
            "equal micro-batches: change one of them"
        )
    if args.warmup is not None and args.warmup >= args.steps:
        raise UserError(
            f"--warmup {args.warmup} leaves nothing of --steps {args.steps}: warm up for less"
        )
    if args.distributed is not None and args.mesh is None:
        raise UserError("--distributed has no effect alone: add --mesh")
    for option in ("checkpoint", "log_dir"):
        _check_directory(_flag(option), getattr(args, option))
    if args.checkpoint is None:
        for option in ("resume", "checkpoint_every"):
            if getattr(args, option):
                raise UserError(f"{_flag(option)} has no effect alone: add --checkpoint DIR")


def _check_directory(flag: str, path: pathlib.Path | None) -> None:
    if path is None:
        return
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"{flag} {path}: '{nearest}' is not a directory, choose another")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{flag} {path}: '{nearest}' may not be written to, choose another")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
