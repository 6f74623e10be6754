"""What a command line of `rl.py` amounts to: its parts, and what its checkpoints must agree on."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from rich.console import Console

from model.decoder import DecoderConfig, Params
from reinforcement import optimizers, options
from reinforcement.guard import GuardOptions
from reinforcement.learning import Settings
from reinforcement.rollouts import Policy, actor_critic
from reinforcement.supervised import imitate
from reinforcement.tasks import TASKS, Task
from running.arguments import by_name
from running.checkpointing import Checkpoints, nothing_to_resume, open_runs
from running.errors import UserError


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the command line asks for, resolved and checked.

    Attributes:
        args: the options.
        task: what is learned.
        model: the shape of the decoder.
        init: makes parameters from a key.
        policy: the decoder with a value head, as a function.
        optimizer: what all optimizers are told.
        rates: learning rates by optimizer.
        guarding: when to go back to a good state.
    """

    args: argparse.Namespace
    task: Task
    model: DecoderConfig
    init: Callable[[jax.Array], Params]
    policy: Policy
    optimizer: optimizers.Options
    rates: dict[str, float]
    guarding: GuardOptions

    def settings(self, name: str) -> Settings:
        """How an iteration with one of the optimizers goes."""
        args, usual = self.args, Settings(self.args.algorithm)

        def given(value: Any, otherwise: Any) -> Any:
            return otherwise if value is None else value

        return Settings(
            algorithm=args.algorithm,
            rollouts=args.rollouts,
            group=given(args.group, usual.group),
            epochs=args.epochs,
            minibatches=args.minibatches,
            clip_ratio=args.clip_ratio,
            discount=given(args.discount, usual.discount),
            decay=given(args.gae_lambda, usual.decay),
            value_weight=given(args.value_weight, usual.value_weight),
            stop_kl=args.stop_kl,
            matrix_free=args.matrix_free and optimizers.RECIPES[name].matrix_free,
        )

    def stages(self, name: str) -> optimizers.Stages:
        """What one of the optimizers projects when."""
        projected = optimizers.RECIPES[name].projected
        ranks = self.optimizer.ranks if projected else {}
        return optimizers.Stages(ranks, self.args.progressive or 0)

    def make_optimizer(
        self, name: str, enabled: tuple[str, ...]
    ) -> optax.GradientTransformationExtraArgs:
        """One of the optimizers, projecting some classes of weights."""
        rate = self.rates.get(name, optimizers.RECIPES[name].learning_rate)
        return optimizers.make(name, rate, self.optimizer, enabled)


def prepare(args: argparse.Namespace) -> Experiment:
    """Resolves the options.

    Args:
        args: what the parser returned.

    Returns:
        The experiment.

    Raises:
        UserError: if they cannot be what the user wants.
    """
    options.check(args)
    task = TASKS[args.task](args.seed)
    try:
        model = DecoderConfig(
            vocab_size=task.vocab_size,
            hidden_size=args.hidden,
            intermediate_size=args.ffn,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            max_position_embeddings=task.prompt_length + task.completion_length,
            param_dtype="float32",
            dtype="float32",
        )
    except ValueError as error:
        raise UserError(f"--hidden, --heads: {error}") from error
    usual = optimizers.Options()
    ranks = by_name(args.rank, usual.ranks)
    projected = [name for name in args.optimizer if optimizers.RECIPES[name].projected]
    if projected and all(value is None for value in ranks.values()):
        raise UserError(
            f"--rank full leaves nothing for {', '.join(projected)} to project: give a class a "
            "rank, or use --optimizer adamw"
        )
    init, policy = actor_critic(model)
    return Experiment(
        args=args,
        task=task,
        model=model,
        init=init,
        policy=policy,
        optimizer=optimizers.Options(
            ranks=ranks,
            clip=args.clip,
            refresh_every=args.refresh_every or usual.refresh_every,
            scale=args.scale or usual.scale,
            weight_decay=args.weight_decay,
            metrics=bool(args.monitor_every),
        ),
        rates=by_name(
            args.lr, {name: optimizers.RECIPES[name].learning_rate for name in args.optimizer}
        ),
        guarding=GuardOptions(collapse=args.collapse),
    )


def supervised_fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Everything that decides where reinforcement learning starts from."""
    args = experiment.args
    return {
        "task": args.task,
        "model": dataclasses.asdict(experiment.model),
        "seed": args.seed,
        "supervised_steps": args.supervised_steps,
    }


def fingerprint(experiment: Experiment, name: str) -> dict[str, Any]:
    """Everything that decides what a run computes, for comparison when it is resumed."""
    tuned: dict[str, Any] = {
        "weight_decay": experiment.optimizer.weight_decay,
        "clip": experiment.optimizer.clip,
    }
    if optimizers.RECIPES[name].projected:
        tuned = dataclasses.asdict(experiment.optimizer)
        tuned["progressive"] = experiment.args.progressive
    return supervised_fingerprint(experiment) | {
        "optimizer": {"name": name, "lr": experiment.rates[name], **tuned},
        "settings": dataclasses.asdict(experiment.settings(name)),
        "kl": experiment.args.kl,
        "guard": dataclasses.asdict(experiment.guarding),
    }


def open_checkpoints(experiment: Experiment) -> dict[str, Checkpoints]:
    """The checkpoints of supervised training and of every run; none without ``--checkpoint``.

    Args:
        experiment: what will be trained.

    Returns:
        Checkpoints that have been checked; nothing is written yet.

    Raises:
        UserError: if a run would be mixed with another, or there is nothing to resume.
    """
    args = experiment.args
    configs = {name: fingerprint(experiment, name) for name in args.optimizer}
    configs = {"supervised": supervised_fingerprint(experiment)} | configs
    opened = open_runs(args.checkpoint, configs, args.resume)
    if args.resume and opened["supervised"].latest is None:
        raise nothing_to_resume(args.checkpoint)
    return opened


def supervise(experiment: Experiment, checkpoints: Checkpoints | None, console: Console) -> Params:
    """The parameters that all optimizers start from and are kept close to.

    Args:
        experiment: says how they are trained.
        checkpoints: where they are kept, if anywhere.
        console: where to print.

    Returns:
        Parameters that nothing will donate.
    """
    args = experiment.args
    init, key = jax.jit(experiment.init), jax.random.key(args.seed)
    if checkpoints is not None and checkpoints.latest is not None:
        with checkpoints:
            return checkpoints.restore(jax.eval_shape(init, key))[1]

    def observe(step: int, loss: float) -> None:
        if step % 500 == 0 or step == args.supervised_steps:
            console.print(
                f"supervised  step {step:>5}  loss {loss:.3f}", highlight=False, soft_wrap=True
            )

    params = imitate(
        experiment.task,
        experiment.policy,
        init(key),
        args.seed,
        args.supervised_steps,
        observe=observe,
    )
    if checkpoints is not None:
        with checkpoints:
            checkpoints.save(args.supervised_steps, params)
    return params
