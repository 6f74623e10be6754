"""Trains a small byte-level language model with AdamW, then with GaLore, and compares the two.

Without arguments it reads the source text of Python's standard library and takes a few minutes on
two CPU cores. Nothing is downloaded.

  python examples/finetune_lm.py
  python examples/finetune_lm.py --optimizer galore --rank 16 --lr 5e-3 --describe
  python examples/finetune_lm.py --data book.txt --checkpoint runs/book
  python examples/finetune_lm.py --data book.txt --checkpoint runs/book --resume
  python examples/finetune_lm.py --mesh fsdp=4,tp=2 --matrix-free
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from rich.console import Console

import lowrank_optax as lro
from model.decoder import DecoderConfig, functional, next_token_loss
from running import data, optimizers, options, reporting, training
from running.arguments import by_name, log_path
from running.checkpointing import Checkpoints, check_length, nothing_to_resume, open_runs
from running.errors import UserError, exit_code
from running.placement import Placement


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the command line asks for, resolved and checked.

    Attributes:
        args: the options.
        corpus: the data.
        model: the shape of the model.
        optimizer: what all optimizers are told.
        warmup: steps.
        peaks: learning rates by optimizer.
    """

    args: argparse.Namespace
    corpus: data.Corpus
    model: DecoderConfig
    optimizer: optimizers.Options
    warmup: int
    peaks: dict[str, float]


def prepare(args: argparse.Namespace) -> Experiment:
    """Resolves the options.

    Args:
        args: what the parser returned, checked.

    Returns:
        The experiment.

    Raises:
        UserError: if they cannot be what the user wants.
    """
    try:
        text = data.read_files(args.data) if args.data else data.standard_library()
        corpus = data.split(text, args.seq_len)
    except OSError as error:
        raise UserError(
            f"--data {error.filename} cannot be read ({error.strerror}): give readable text files"
        ) from error
    except ValueError as error:
        raise UserError(f"--data: {error}") from error
    try:
        model = DecoderConfig.tiny(
            hidden_size=args.hidden,
            intermediate_size=args.ffn,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            max_position_embeddings=args.seq_len,
            remat=args.remat,
            param_dtype=args.dtype,
            dtype=args.dtype,
        )
    except ValueError as error:
        raise UserError(f"--hidden, --heads, --kv-heads: {error}") from error
    default = optimizers.Options()
    return Experiment(
        args=args,
        corpus=corpus,
        model=model,
        optimizer=optimizers.Options(
            rank=args.rank or default.rank,
            refresh_every=args.refresh_every or default.refresh_every,
            scale=args.scale,
            weight_decay=args.weight_decay,
        ),
        warmup=min(20, args.steps // 10) if args.warmup is None else args.warmup,
        peaks=by_name(
            args.lr, {name: optimizers.RECIPES[name].learning_rate for name in args.optimizer}
        ),
    )


def fingerprint(experiment: Experiment, name: str) -> dict[str, Any]:
    """Everything that decides what a run computes, for comparison when it is resumed."""
    args = experiment.args
    tuned = dataclasses.asdict(experiment.optimizer)
    if optimizers.RECIPES[name].projected:
        tuned["matrix_free"] = args.matrix_free
    else:
        tuned = {"weight_decay": args.weight_decay}
    return {
        "optimizer": {"name": name, "lr": experiment.peaks[name], "clip": args.clip, **tuned},
        "model": dataclasses.asdict(experiment.model),
        "data": experiment.corpus.fingerprint,
        "schedule": args.schedule,
        "warmup": experiment.warmup,
        # The length shapes a cosine; a constant schedule may be prolonged.
        "steps": args.steps if args.schedule == "cosine" else None,
        "batch_size": args.batch_size,
        "accumulate": args.accumulate,
        "seed": args.seed,
    }


def open_checkpoints(experiment: Experiment) -> dict[str, Checkpoints]:
    """The checkpoints of every run, by optimizer; none without ``--checkpoint``.

    Args:
        experiment: what will be trained.

    Returns:
        Checkpoints that have been checked; nothing is written yet.

    Raises:
        UserError: if a run would be mixed with another, or there is nothing to resume.
    """
    args = experiment.args
    configs = {name: fingerprint(experiment, name) for name in args.optimizer}
    opened = open_runs(args.checkpoint, configs, args.resume)
    if args.resume and all(checkpoints.latest is None for checkpoints in opened.values()):
        raise nothing_to_resume(args.checkpoint, opened)
    return opened


def make_optimizer(
    experiment: Experiment, name: str
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """One optimizer as the experiment wants it, and its learning rates."""
    args = experiment.args
    peak = experiment.peaks.get(name, 0.0)
    schedule = optimizers.make_schedule(peak, args.steps, experiment.warmup, args.schedule)
    return optimizers.make(name, schedule, experiment.optimizer, args.clip), schedule


def restore_or_init(
    checkpoints: Checkpoints | None,
    init: Callable[[jax.Array], training.Params],
    tx: optax.GradientTransformation,
    seed: int,
    shardings: Any = None,
) -> tuple[int, tuple[training.Params, optax.OptState]]:
    """The latest state of a run, or the first one.

    Args:
        checkpoints: where to look.
        init: makes parameters from a key.
        tx: the optimizer.
        seed: of the parameters.
        shardings: of parameters and state, a pair of trees; ``None`` for one device.

    Returns:
        How many updates the state has seen; parameters and optimizer state.
    """

    def start(key: jax.Array) -> tuple[training.Params, optax.OptState]:
        params = init(key)
        return params, tx.init(params)

    key = jax.random.key(seed)
    if checkpoints is None or checkpoints.latest is None:
        return 0, jax.jit(start, out_shardings=shardings)(key)
    shapes = jax.eval_shape(start, key)
    if shardings is not None:
        shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )
    return checkpoints.restore(shapes)


def run(args: argparse.Namespace, console: Console) -> None:
    """Trains with every optimizer in turn and prints the comparison.

    Args:
        args: the options.
        console: where to print.
    """
    options.check(args)
    if args.distributed is not None:
        jax.distributed.initialize(*args.distributed)
    # Of several processes one speaks.
    speaks = jax.process_index() == 0
    console.quiet = not speaks
    experiment = prepare(args)
    placement = None
    if args.mesh is not None:
        placement = Placement.make(args.mesh, args.batch_size // args.accumulate)
    checkpoints = open_checkpoints(experiment)
    logs = {name: log_path(args, name) if speaks else None for name in args.optimizer}
    init, apply = functional(experiment.model)

    def loss_fn(params: training.Params, tokens: jax.Array) -> jax.Array:
        return next_token_loss(apply(params, tokens[:, :-1]), tokens[:, 1:])

    shapes = jax.eval_shape(init, jax.random.key(0))
    console.print(
        f"{sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters; "
        f"{len(experiment.corpus.train):,} bytes to train on, "
        f"{len(experiment.corpus.validation):,} held out; "
        f"{args.batch_size * args.seq_len:,} bytes a step",
        highlight=False,
        soft_wrap=True,
    )
    evaluate = training.make_evaluate(loss_fn)
    settings = training.Settings(
        steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
        eval_every=args.eval_every or max(args.steps // 4, 1),
        save_every=args.checkpoint_every or 100,
    )
    results = {}
    for name in args.optimizer:
        tx, schedule = make_optimizer(experiment, name)
        matrix_free = args.matrix_free and optimizers.RECIPES[name].projected
        make_gradients = training.compact_gradients if matrix_free else training.full_gradients
        gradients = make_gradients(loss_fn, args.accumulate)
        if args.describe and optimizers.RECIPES[name].projected:
            console.print(str(lro.describe(tx, shapes)), highlight=False, soft_wrap=True)
        shardings = None if placement is None else placement.state(tx, shapes)
        with contextlib.ExitStack() as stack:
            saved = checkpoints.get(name)
            if saved is not None:
                stack.enter_context(saved)
            start, state = restore_or_init(saved, init, tx, args.seed, shardings)
            check_length(name, start, args.steps, "steps")
            observer = reporting.Reporter(name, start, args.steps, console, logs[name])
            results[name] = training.train(
                state,
                start,
                train_step=training.make_train_step(gradients, tx, shardings),
                evaluate=evaluate,
                corpus=experiment.corpus,
                schedule=schedule,
                settings=settings,
                observer=stack.enter_context(observer),
                save=None if saved is None else saved.save,
                **({} if placement is None else {"place": placement.tokens}),
            )
    adamw, _ = make_optimizer(experiment, "adamw")
    yardstick = training.count_bytes(jax.eval_shape(adamw.init, shapes))
    reporting.print_results(console, results, yardstick)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: the arguments; ``None`` takes the process's own.

    Returns:
        The exit code: 2 for what the user has to put right, 130 after Ctrl-C.
    """
    return exit_code(
        "finetune_lm", lambda: run(options.make_parser(__doc__).parse_args(argv), Console())
    )


if __name__ == "__main__":
    sys.exit(main())
