"""The command line of `finetune_lm.py`: its options, and which of them contradict each other."""

import argparse
import pathlib

from model.decoder import DecoderConfig
from running.arguments import (
    Parser,
    check_directory,
    count,
    count_or_zero,
    flag_of,
    mesh_sizes,
    named_rate,
    number,
    positive,
    process,
    rank,
)
from running.errors import UserError
from running.optimizers import RECIPES, Options


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options, by group.

    Args:
        description: what the script does.

    Returns:
        A parser that raises `UserError`.
    """
    parser = Parser(description)
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
    add("--rank", type=rank, help=f"integer, or share of the smaller side ({options.rank})")
    add("--refresh-every", type=count, help=f"steps a basis is kept ({options.refresh_every})")
    add("--scale", type=positive, help="factor on projected updates (the optimizer's own)")
    add(
        "--lr",
        type=named_rate(RECIPES),
        nargs="+",
        default=[],
        metavar="LR",
        help="peak learning rate; NAME=LR sets one optimizer's (each one's own)",
    )
    add("--weight-decay", type=number, default=0.0, help="decoupled (%(default)s)")
    add("--clip", type=number, default=1.0, help="largest gradient norm, 0 for any (%(default)s)")
    add("--warmup", type=count_or_zero, help="steps (20, or a tenth of a short run)")
    add("--schedule", choices=("cosine", "constant"), default="cosine", help="after the warm-up")
    add(
        "--matrix-free",
        action="store_true",
        help="make no full gradient of a projected weight; AdamW is trained as ever",
    )
    add("--describe", action="store_true", help="first print what is projected")

    add = parser.add_argument_group("data and length").add_argument
    add("--data", nargs="+", metavar="FILE", help="text files (Python's standard library)")
    add("--steps", type=count, default=400, help="updates (%(default)s)")
    add("--seq-len", type=count, default=128, help="bytes a window (%(default)s)")
    add("--batch-size", type=count, default=8, help="windows an update (%(default)s)")
    add("--accumulate", type=count, default=1, help="micro-batches an update (%(default)s)")
    add("--eval-every", type=count, help="updates between validations (a quarter of the run)")
    add("--seed", type=count_or_zero, default=0, help="of weights and data order (%(default)s)")

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=count, default=tiny.num_hidden_layers, help="(%(default)s)")
    add("--hidden", type=count, default=tiny.hidden_size, help="(%(default)s)")
    add("--heads", type=count, default=tiny.num_attention_heads, help="(%(default)s)")
    add("--kv-heads", type=count, default=tiny.num_key_value_heads, help="(%(default)s)")
    add("--ffn", type=count, default=tiny.intermediate_size, help="(%(default)s)")
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
        type=mesh_sizes,
        metavar="AXIS=SIZE,...",
        help="sizes of data, fsdp and tp, such as fsdp=4,tp=2 (one device)",
    )
    add(
        "--distributed",
        type=process,
        nargs="?",
        const=(),
        metavar="HOST:PORT,COUNT,NUMBER",
        help="be one of several processes; TPU pods and Slurm know which (needs --mesh)",
    )

    add = parser.add_argument_group("output").add_argument
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="a sub-directory per optimizer")
    add("--checkpoint-every", type=count, help="updates between checkpoints (100)")
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
                    f"{flag_of(option)} has no effect on {', '.join(chosen)}: leave it out or add "
                    "a low-rank optimizer"
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
        check_directory(flag_of(option), getattr(args, option))
    if args.checkpoint is None:
        for option in ("resume", "checkpoint_every"):
            if getattr(args, option):
                raise UserError(f"{flag_of(option)} has no effect alone: add --checkpoint DIR")
