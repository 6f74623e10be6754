"""The command line of `finetune_llm.py`: its options, and which of them contradict each other."""

import argparse
import pathlib

from model import lora
from model.master_weights import PRECISIONS
from running.arguments import (
    Parser,
    add_batches,
    add_mesh,
    add_step_sizes,
    add_subspace,
    check_directory,
    check_micro_batches,
    count,
    count_or_zero,
    positive,
    refuse_alone,
    refuse_on,
)
from running.errors import UserError
from running.optimizers import RECIPES

QTYPES = ("int8", "int4", "nf4")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options, by group.

    Args:
        description: what the script does.

    Returns:
        A parser that raises `UserError`.
    """
    parser = Parser(description)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", required=True, metavar="DIR", help="checkpoint, or organisation/model to fetch")
    add("--data", required=True, type=pathlib.Path, metavar="FILE", help="JSON lines to learn")
    add("--validation", type=pathlib.Path, metavar="FILE", help="others (5 %% of --data)")
    add("--seq-len", type=count, default=1024, help="tokens a row (%(default)s)")
    add("--drop-long", action="store_true", help="leave out examples that do not fit into a row")
    add(
        "--precision",
        choices=PRECISIONS,
        default="stochastic",
        help="bfloat16 weights rounded at random, or with a float32 master copy, or neither; or "
        "float32 throughout (%(default)s)",
    )
    add_mesh(add)

    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=RECIPES, default="galore", help="(%(default)s)")
    add_subspace(add, usual_rank=128, usual_interval=200)
    add("--lr", type=positive, help="peak learning rate (1e-4; adamw 2e-5)")
    add_step_sizes(add, "a twentieth of the run")
    add("--matrix-free", action="store_true", help="make no full gradient of a projected weight")
    add("--describe", action="store_true", help="first print what is projected")

    add = parser.add_argument_group("LoRA").add_argument
    add(
        "--lora",
        nargs="+",
        default=[],
        metavar="NAME=RANK",
        help="freeze attention, mlp or a single projection, and train adapters beside it",
    )
    add("--lora-alpha", type=positive, help="adapters are scaled by alpha / rank (16)")
    add("--lora-lr", type=positive, help="peak learning rate of adapters, by AdamW (2e-4)")
    add("--quantize", choices=QTYPES, help="keep the frozen weights in few bits (needs qwix)")

    parser_length = parser.add_argument_group("length")
    add = parser_length.add_mutually_exclusive_group().add_argument
    add("--epochs", type=count, help="passes over the data (1)")
    add("--steps", type=count, help="updates, in place of --epochs")
    add = parser_length.add_argument
    add_batches(add, "rows")
    add("--eval-every", type=count, help="updates between validations (a quarter of the run)")
    add("--seed", type=count_or_zero, default=0, help="of data order and rounding (%(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--export", type=pathlib.Path, metavar="DIR", help="the trained model, for transformers")
    add("--overwrite", action="store_true", help="replace the model in the --export directory")
    add("--checkpoint", type=pathlib.Path, metavar="DIR", help="what --resume goes on from")
    add("--checkpoint-every", type=count, help="updates between checkpoints (100)")
    add("--resume", action="store_true", help="go on from the latest checkpoint in DIR")
    add("--log", type=pathlib.Path, metavar="FILE", help="every step's metrics, as JSON lines")
    return parser


def check(args: argparse.Namespace) -> lora.Ranks:
    """Refuses options that contradict each other or would silently have no effect.

    Args:
        args: what the parser returned.

    Returns:
        The ranks of adapters.

    Raises:
        UserError: with the first contradiction.
    """
    if not RECIPES[args.optimizer].projected:
        options = ("matrix_free", "rank", "refresh_every", "scale")
        refuse_on(args, options, args.optimizer, "choose a low-rank --optimizer")
    refuse_alone(args, ("lora_alpha", "lora_lr", "quantize"), "lora")
    refuse_alone(args, ("overwrite",), "export")
    refuse_alone(args, ("resume", "checkpoint_every"), "checkpoint")
    try:
        ranks = lora.parse_ranks(args.lora)
    except ValueError as error:
        raise UserError(f"--lora {error}") from error
    check_micro_batches(args)
    check_directory("--checkpoint", args.checkpoint)
    check_directory("--export", args.export and args.export.parent)
    check_directory("--log", args.log and args.log.parent)
    if args.log is not None and args.log.exists() and not args.resume:
        raise UserError(f"--log '{args.log}' exists already: choose another file")
    return ranks
