"""The command line of `rl.py`: its options, and which of them contradict each other."""

import argparse

from reinforcement.guard import GuardOptions
from reinforcement.learning import ALGORITHMS, Settings
from reinforcement.optimizers import CLASSES, RECIPES, Options, Rank
from reinforcement.tasks import TASKS
from running.arguments import (
    Parser,
    add_learning_rates,
    add_optimizers,
    add_output,
    check_optimizers,
    check_output,
    count,
    count_or_zero,
    flag_of,
    number,
    positive,
    rank,
    refuse_alone,
    refuse_on,
)
from running.errors import UserError

ITERATIONS = {"paths": 80, "addition": 120}
SUPERVISED_STEPS = {"paths": 300, "addition": 800}
USUAL_ALGORITHM = {"paths": "ppo", "addition": "grpo"}


def _class_rank(text: str) -> tuple[str | None, Rank]:
    name, _, value = text.rpartition("=")
    if name and name not in CLASSES:
        raise argparse.ArgumentTypeError(
            f"{text} names none of the classes {', '.join(CLASSES)}; give RANK or CLASS=RANK"
        )
    return name or None, None if value == "full" else rank(value)


def _share(text: str) -> float:
    value = number(text)
    if value <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options, by group.

    Args:
        description: what the script does.

    Returns:
        A parser that raises `UserError`.
    """
    parser = Parser(description)
    guard, usual, optimizer = GuardOptions(), Settings("ppo"), Options()

    add = parser.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="paths", help="what is learned (%(default)s)")
    add("--algorithm", choices=ALGORITHMS, help="(ppo for paths, grpo for addition)")
    add("--seed", type=count_or_zero, default=0, help="of everything (%(default)s)")
    add("--supervised-steps", type=count, help="before, on flawed demonstrations (300, 800)")
    add("--iterations", type=count, help="of reinforcement learning (80, 120)")

    add = parser.add_argument_group("optimizer").add_argument
    add_optimizers(add, RECIPES, ["adamw", "galore", "logra"])
    add(
        "--rank",
        type=_class_rank,
        nargs="+",
        default=[],
        metavar="RANK",
        help=f"integer, share of the smaller side, or full; CLASS=RANK, with CLASS one of "
        f"{', '.join(CLASSES)}, sets that of one kind of weights (24)",
    )
    add(
        "--progressive",
        type=count,
        metavar="N",
        help="project the MLP only at first, attention too after N iterations, and embedding and "
        "head after 2N",
    )
    add("--refresh-every", type=count, help=f"updates a basis is kept ({optimizer.refresh_every})")
    add("--scale", type=positive, help=f"factor on projected updates ({optimizer.scale:g})")
    add_learning_rates(add, RECIPES)
    add("--weight-decay", type=number, default=0.0, help="decoupled (%(default)s)")
    add(
        "--clip",
        type=number,
        default=optimizer.clip,
        help="largest norm of the sketched gradients, 0 for any (%(default)s)",
    )
    add("--matrix-free", action="store_true", help="make no full gradient of a projected weight")
    add("--describe", action="store_true", help="first print what is projected")
    add(
        "--monitor-every",
        type=count,
        metavar="N",
        help="every N iterations, warn where a sketch loses too much",
    )
    add("--min-snr", type=positive, help="what is too little effective snr (1)")

    add = parser.add_argument_group("reinforcement learning").add_argument
    add("--rollouts", type=count, default=usual.rollouts, help="an iteration (%(default)s)")
    add("--group", type=count, help=f"answers to a prompt in grpo ({usual.group})")
    add("--epochs", type=count, default=usual.epochs, help="over the rollouts (%(default)s)")
    add("--minibatches", type=count, default=usual.minibatches, help="an epoch (%(default)s)")
    add("--clip-ratio", type=positive, default=usual.clip_ratio, help="(%(default)s)")
    add("--discount", type=_share, help=f"of later rewards, in ppo ({usual.discount:g})")
    add("--gae-lambda", type=_share, help=f"in ppo ({usual.decay:g})")
    add("--value-weight", type=number, help=f"in the loss of ppo ({usual.value_weight:g})")

    add = parser.add_argument_group("guards against collapse").add_argument
    add("--kl", type=number, default=0.02, help="weight of the KL to the start (%(default)s)")
    add(
        "--stop-kl",
        type=number,
        default=0.0,
        help="KL to the policy that sampled, nats a token, above which the rest of an iteration is "
        "left out, 0 for any (%(default)s)",
    )
    add(
        "--collapse",
        type=_share,
        default=guard.collapse,
        help="go back to the best state when the running reward falls below this share of its "
        "best, 0 for never (%(default)s)",
    )

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=count, default=3, help="(%(default)s)")
    add("--hidden", type=count, default=96, help="(%(default)s)")
    add("--heads", type=count, default=4, help="(%(default)s)")
    add("--ffn", type=count, default=256, help="(%(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--eval-every", type=count, help="iterations between scores (a quarter of the run)")
    add_output(add, "iterations", 20, "every iteration")
    return parser


def check(args: argparse.Namespace) -> None:
    """Fills in what depends on the task, and refuses what contradicts itself or has no effect.

    Args:
        args: what the parser returned; changed in place.

    Raises:
        UserError: with the first contradiction.
    """
    args.algorithm = args.algorithm or USUAL_ALGORITHM[args.task]
    args.iterations = args.iterations or ITERATIONS[args.task]
    args.supervised_steps = args.supervised_steps or SUPERVISED_STEPS[args.task]
    _check_optimizers(args)
    _check_learning(args)
    check_output(args)


def _check_optimizers(args: argparse.Namespace) -> None:
    chosen = args.optimizer
    for option, values in (("--lr", args.lr), ("--rank", args.rank)):
        named = [name for name, _ in values]
        if len(set(named)) < len(named):
            raise UserError(f"{option} sets a value twice: give one for all, NAME=VALUE once each")
    check_optimizers(args)
    if not any(RECIPES[name].projected for name in chosen):
        options = ("rank", "progressive", "scale", "matrix_free", "monitor_every")
        projected = ", ".join(name for name, recipe in RECIPES.items() if recipe.projected)
        refuse_on(args, options, ", ".join(chosen), f"add one of {projected}")
    if args.refresh_every and "galore" not in chosen:
        raise UserError("--refresh-every has no effect without galore: add it to --optimizer")
    refuse_alone(args, ("min_snr",), "monitor_every", "N")
    if args.matrix_free:
        refused = [n for n in chosen if RECIPES[n].projected and not RECIPES[n].matrix_free]
        able = ", ".join(n for n, recipe in RECIPES.items() if recipe.matrix_free)
        if refused:
            raise UserError(
                f"--matrix-free cannot train {', '.join(refused)}, whose bases are learned from "
                f"full gradients: choose --optimizer {able}"
            )
        if args.monitor_every:
            raise UserError(
                "--monitor-every compares sketches with full gradients, which --matrix-free never "
                "makes: leave one of them out"
            )


def _check_learning(args: argparse.Namespace) -> None:
    group = args.group or Settings("grpo").group
    if args.algorithm == "grpo":
        for option in ("discount", "gae_lambda", "value_weight"):
            if getattr(args, option) is not None:
                raise UserError(f"{flag_of(option)} has no effect on grpo: use --algorithm ppo")
        if group < 2:
            raise UserError("--group 1 leaves nothing to compare an answer with: give at least 2")
        if args.rollouts % group:
            raise UserError(
                f"--rollouts {args.rollouts} does not divide into groups of --group {group}"
            )
    elif args.group is not None:
        raise UserError("--group has no effect on ppo: use --algorithm grpo")
    if args.rollouts % args.minibatches:
        raise UserError(
            f"--rollouts {args.rollouts} does not divide into --minibatches {args.minibatches}"
        )
