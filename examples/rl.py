"""Reinforcement learning with verifiable rewards, by AdamW, GaLore and LoGRA, compared.

A small decoder first imitates flawed demonstrations, random walks on a graph or sums most of which
are wrong, and then learns by PPO or GRPO from what a program says of its answers. It takes a few
minutes on two CPU cores; nothing is downloaded.

  python examples/rl.py
  python examples/rl.py --task addition --optimizer galore --rank 6 --monitor-every 20
  python examples/rl.py --optimizer galore --progressive 20 --rank 8 attention=16
  python examples/rl.py --checkpoint runs/paths
  python examples/rl.py --checkpoint runs/paths --resume
"""

import contextlib
import sys
from collections.abc import Sequence

import jax
import optax
from rich.console import Console

import lowrank_optax as lro
from model.decoder import Params
from monitor import Monitor, Thresholds
from reinforcement import options, reporting
from reinforcement.experiment import Experiment, open_checkpoints, prepare, supervise
from reinforcement.learning import make_iteration, make_scorer
from reinforcement.optimizers import RECIPES
from reinforcement.training import learn, start_run
from running.arguments import log_path
from running.checkpointing import Checkpoints, check_length
from running.errors import exit_code
from running.training import count_bytes

SCORED_ANSWERS = 1000
"""About how many answers to held-out prompts a score is the mean of."""


def run_one(
    experiment: Experiment,
    name: str,
    reference: Params,
    saved: Checkpoints | None,
    console: Console,
) -> reporting.Result:
    """Trains with one optimizer.

    Args:
        experiment: what the command line asks for.
        name: of the optimizer.
        reference: parameters to start from, and to stay close to.
        saved: where its checkpoints go, if anywhere.
        console: where to print.

    Returns:
        What came of it.
    """
    args, task, policy = experiment.args, experiment.task, experiment.policy
    stages, settings = experiment.stages(name), experiment.settings(name)
    projected = RECIPES[name].projected

    def make_optimizer(enabled: tuple[str, ...]) -> optax.GradientTransformationExtraArgs:
        tx = experiment.make_optimizer(name, enabled)
        if args.describe and projected:
            console.print(str(lro.describe(tx, reference)), highlight=False, soft_wrap=True)
        return tx

    start = 0 if saved is None else saved.latest or 0
    check_length(name, start, args.iterations, "iterations")
    tx = experiment.make_optimizer(name, stages.at(max(start - 1, 0)))
    if saved is None or start == 0:
        state = start_run(reference, tx, args.kl)
    else:
        _, state = saved.restore(jax.eval_shape(lambda p: start_run(p, tx, args.kl), reference))
    reporter = reporting.RewardReporter(name, start, args.iterations, console, log_path(args, name))
    monitor = None
    if args.monitor_every and projected:
        thresholds = Thresholds(min_snr=args.min_snr or Thresholds.min_snr)
        monitor = Monitor(thresholds, args.monitor_every, reporter.note)
    with reporter:
        return learn(
            state,
            start,
            iterations=args.iterations,
            stages=stages,
            make_optimizer=make_optimizer,
            make_iteration=lambda tx: make_iteration(
                task, policy, tx, settings, experiment.guarding
            ),
            reference=reference,
            score=make_scorer(task, policy, SCORED_ANSWERS // len(task.test_prompts)),
            seed=args.seed,
            eval_every=args.eval_every or max(args.iterations // 4, 1),
            save_every=args.checkpoint_every or 20,
            observer=reporter,
            monitor=monitor,
            save=None if saved is None else saved.save,
        )


def run(experiment: Experiment, console: Console) -> dict[str, reporting.Result]:
    """Trains with every optimizer in turn and prints the comparison.

    Args:
        experiment: what the command line asks for.
        console: where to print.

    Returns:
        What came of it, by optimizer.
    """
    names = experiment.args.optimizer
    opened = open_checkpoints(experiment)
    for name in names:
        log_path(experiment.args, name)  # before anything is computed
    reference = supervise(experiment, opened.get("supervised"), console)
    results = {}
    for name in names:
        saved = opened.get(name)
        with saved or contextlib.nullcontext():
            results[name] = run_one(experiment, name, reference, saved, console)
    adamw = experiment.make_optimizer("adamw", ())
    yardstick = count_bytes(jax.eval_shape(adamw.init, reference))
    reporting.print_results(console, results, yardstick)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: the arguments; ``None`` takes the process's own.

    Returns:
        The exit code: 2 for what the user has to put right, 130 after Ctrl-C.
    """
    return exit_code(
        "rl", lambda: run(prepare(options.make_parser(__doc__).parse_args(argv)), Console())
    )


if __name__ == "__main__":
    sys.exit(main())
