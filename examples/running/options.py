"""The command line of `finetune_lm.py`: its options, and which of them contradict each other."""

import argparse

from model.decoder import DecoderConfig
from running.arguments import (
    Parser,
    add_batches,
    add_learning_rates,
    add_mesh,
    add_optimizers,
    add_output,
    add_step_sizes,
    add_subspace,
    check_micro_batches,
    check_optimizers,
    check_output,
    count,
    count_or_zero,
    process,
    refuse_on,
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
    add_optimizers(add, RECIPES, ["adamw", "galore"])
    add_subspace(add, options.rank, options.refresh_every)
    add_learning_rates(add, RECIPES, "peak learning rate")
    add_step_sizes(add, "20, or a tenth of a short run")
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
    add_batches(add, "windows")
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
    add_mesh(add)
    add(
        "--distributed",
        type=process,
        nargs="?",
        const=(),
        metavar="HOST:PORT,COUNT,NUMBER",
        help="be one of several processes; TPU pods and Slurm know which (needs --mesh)",
    )

    add = parser.add_argument_group("output").add_argument
    add_output(add, "updates", 100, "every step's metrics,")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuses options that contradict each other or would silently have no effect.

    Args:
        args: what the parser returned.

    Raises:
        UserError: with the first contradiction.
    """
    named = [name for name, _ in args.lr]
    if len(set(named)) < len(named):
        raise UserError("--lr sets a learning rate twice: give LR once, NAME=LR once each")
    check_optimizers(args)
    if not any(RECIPES[name].projected for name in args.optimizer):
        options = ("matrix_free", "rank", "refresh_every", "scale")
        refuse_on(args, options, ", ".join(args.optimizer), "add a low-rank optimizer")
    check_micro_batches(args)
    if args.warmup is not None and args.warmup >= args.steps:
        raise UserError(
            f"--warmup {args.warmup} leaves nothing of --steps {args.steps}: warm up for less"
        )
    if args.distributed is not None and args.mesh is None:
        raise UserError("--distributed has no effect alone: add --mesh")
    check_output(args)
