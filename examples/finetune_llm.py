r"""Fine-tunes all parameters of a Hugging Face model: Qwen2, Qwen2.5, Qwen3 or LLaMA.

The model is a directory of safetensors with its tokenizer; what is learned are the answers in a
file of JSON lines. The result is a directory that transformers loads. Needs the llm extra:
pip install 'lowrank-optax[llm]'.

  python examples/finetune_llm.py --model Qwen2.5-0.5B-Instruct --data chat.jsonl --export tuned
  python examples/finetune_llm.py --model Qwen/Qwen3-4B --data chat.jsonl --export tuned \
      --rank 128 --matrix-free --batch-size 32 --accumulate 4 --mesh fsdp=8 --checkpoint runs/a
  python examples/finetune_llm.py --model DIR --data chat.jsonl --export tuned \
      --lora attention=8 --quantize int8
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from rich.console import Console

import lowrank_optax as lro
from huggingface import options, weights
from huggingface.experiment import Experiment, fingerprint, prepare
from model import lora
from model.decoder import DecoderConfig, functional
from model.master_weights import apply_precision, seen_by_optimizer
from running import optimizers, placement, reporting, training
from running.checkpointing import Checkpoints, nothing_to_resume
from running.errors import UserError, exit_code


def make_optimizer(
    experiment: Experiment, trained: Any
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """The optimizer, clipping and rounding included, and its learning rates.

    Args:
        experiment: what is asked for.
        trained: the parameters that are trained, or their shapes.
    """
    args = experiment.args

    def schedule(peak: float) -> optax.Schedule:
        return optimizers.make_schedule(peak, experiment.steps, experiment.warmup, args.schedule)

    tx = optimizers.make(args.optimizer, schedule(experiment.peak), experiment.optimizer, clip=0)
    if args.lora:
        adapters = optax.adamw(schedule(experiment.lora_peak), weight_decay=0.0)
        tx = optax.partition({"lora": adapters, "rest": tx}, lora.label(trained))
    if args.clip:
        tx = optax.chain(optax.clip_by_global_norm(args.clip), tx)
    return apply_precision(args.precision, tx, args.seed), schedule(experiment.peak)


def load_params(experiment: Experiment) -> tuple[Any, Any]:
    """Reads the checkpoint; adds adapters, and quantises what they freeze.

    Returns:
        The parameters that are trained, and those that are frozen.
    """
    args, model = experiment.args, experiment.model
    init, _ = functional(dataclasses.replace(model, lora_ranks=()))
    shapes = jax.eval_shape(init, jax.random.key(0))
    mesh = experiment.mesh
    shardings = None if mesh is None else placement.param_shardings(mesh, shapes)
    params = weights.load(experiment.directory, shapes, shardings)
    if not model.lora_ranks:
        return params, {}
    init, _ = functional(model)

    def adapters(key: jax.Array) -> list[jax.Array | None]:
        fresh = init(key)
        labels = jax.tree.leaves(lora.label(fresh))
        leaves = zip(labels, jax.tree.leaves(fresh), strict=True)
        return [leaf if label == "lora" else None for label, leaf in leaves]

    whole = jax.eval_shape(init, jax.random.key(0))
    placed = None
    if mesh is not None:
        labels = jax.tree.leaves(lora.label(whole))
        every = jax.tree.leaves(placement.param_shardings(mesh, whole))
        placed = [s if label == "lora" else None for label, s in zip(labels, every, strict=True)]
    fresh = jax.jit(adapters, out_shardings=placed)(jax.random.key(args.seed))
    loaded = iter(jax.tree.leaves(params))
    leaves = [next(loaded) if leaf is None else leaf for leaf in fresh]
    trained, frozen = lora.split(jax.tree.unflatten(jax.tree.structure(whole), leaves))
    return trained, lora.quantize(frozen, args.quantize) if args.quantize else frozen


def make_losses(
    model: DecoderConfig,
) -> tuple[training.LossFn, Callable[..., tuple[jax.Array, jax.Array]]]:
    """The loss of a packed batch, and its weighted sum with the sum of weights.

    Args:
        model: the shape.
    """
    _, apply = functional(model)

    def sums(trained: Any, batch: Any, frozen: Any) -> tuple[jax.Array, jax.Array]:
        params = lora.join(trained, frozen)
        logits = apply(params, batch["tokens"], batch["positions"], batch["segments"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    def loss_fn(trained: Any, batch: Any, frozen: Any) -> jax.Array:
        return sums(trained, batch, frozen)[0] / batch["tokens"].shape[0]

    return loss_fn, sums


def start_or_resume(
    experiment: Experiment, checkpoints: Checkpoints | None
) -> tuple[int, tuple[Any, optax.OptState], Any, optax.GradientTransformationExtraArgs, Any]:
    """The state of a run, first or latest.

    Args:
        experiment: what is asked for.
        checkpoints: where to look.

    Returns:
        How many updates it has seen; what is trained, with the optimizer's state; what is frozen;
        the optimizer; and where the state lies, ``None`` without a mesh.
    """
    trained, frozen = load_params(experiment)
    tx, _ = make_optimizer(experiment, trained)
    shardings = None
    if experiment.mesh is not None:
        placed = placement.param_shardings(experiment.mesh, trained)
        shardings = placed, lro.state_shardings(tx, trained, placed)
    if checkpoints is None or checkpoints.latest is None:
        init = jax.jit(tx.init, out_shardings=None if shardings is None else shardings[1])
        return 0, (trained, init(trained)), frozen, tx, shardings
    like = trained, jax.eval_shape(tx.init, trained)
    del trained  # the checkpoint takes their place
    if shardings is None:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    else:
        like = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            like,
            shardings,
        )
    start, state = checkpoints.restore(like)
    return start, state, frozen, tx, shardings


def run(args: argparse.Namespace, console: Console) -> None:
    """Trains, validates and exports.

    Args:
        args: the options.
        console: where to print.
    """
    experiment = prepare(args, console)
    checkpoints = None
    if args.checkpoint is not None:
        checkpoints = Checkpoints(args.checkpoint, fingerprint(experiment))
        checkpoints.check(args.resume)
        if args.resume and checkpoints.latest is None:
            raise nothing_to_resume(args.checkpoint)
    start, state, frozen, tx, shardings = start_or_resume(experiment, checkpoints)
    if start > experiment.steps:
        raise UserError(
            f"the checkpoint has seen {start} steps, more than {experiment.steps}: ask for more"
        )
    _, schedule = make_optimizer(experiment, state[0])
    if args.describe:
        seen = jax.tree.map(lambda x: seen_by_optimizer(args.precision, x), state[0])
        console.print(str(lro.describe(tx, seen)), highlight=False, soft_wrap=True)
    say = _Speaker(console)
    say.sizes(experiment, state[0], frozen)

    loss_fn, sums = make_losses(experiment.model)
    make_gradients = training.compact_gradients if args.matrix_free else training.full_gradients
    step = training.make_train_step(make_gradients(loss_fn, args.accumulate), tx, shardings)
    put = _put(experiment.mesh)
    jitted_sums = jax.jit(sums)

    def evaluate(trained: Any, batches: Iterable[Any]) -> float:
        found = [jitted_sums(trained, batch, frozen) for batch in batches]
        return float(sum(loss for loss, _ in found) / sum(count for _, count in found))

    if start == 0:
        before = evaluate(state[0], map(put, experiment.data.validation_batches(args.batch_size)))
        say.line(f"before training: val {before:.4f}")
    settings = training.Settings(
        steps=experiment.steps,
        batch_size=args.batch_size,
        seed=args.seed,
        eval_every=args.eval_every or max(experiment.steps // 4, 1),
        save_every=args.checkpoint_every or 100,
    )
    with contextlib.ExitStack() as stack:
        if checkpoints is not None:
            stack.enter_context(checkpoints)
        observer = reporting.Reporter(args.optimizer, start, experiment.steps, console, args.log)
        result = training.train(
            state,
            start,
            train_step=lambda trained, opt_state, batch: step(trained, opt_state, batch, frozen),
            evaluate=evaluate,
            corpus=experiment.data,
            schedule=schedule,
            settings=settings,
            observer=stack.enter_context(observer),
            save=None if checkpoints is None else checkpoints.save,
            place=put,
        )
    say.result(result, experiment)
    if args.export is not None:
        params = lora.join(result.params, frozen)
        params = lora.merge(params, experiment.model.lora_alpha)
        weights.export(args.export, params, experiment.directory, overwrite=args.overwrite)
        say.line(f"exported to {args.export}")


def _put(mesh: Mesh | None) -> Callable[[Any], Any]:
    """Places a batch."""
    if mesh is None:
        return lambda batch: batch
    return lambda batch: jax.device_put(batch, placement.batch_sharding(mesh))


class _Speaker:
    """Prints facts, one a line."""

    def __init__(self, console: Console):
        self._console = console

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def sizes(self, experiment: Experiment, trained: Any, frozen: Any) -> None:
        data, args = experiment.data, experiment.args
        count = sum(leaf.size for leaf in jax.tree.leaves(trained))
        share = sum(e.length for e in data.train) / (len(data.rows) * data.length)
        self.line(
            f"{count:,} parameters are trained, {training.count_bytes(frozen):,} bytes are frozen; "
            f"{len(data.train):,} examples in {len(data.rows):,} rows ({share:.0%} full), "
            f"{len(data.validation):,} held out; {experiment.steps:,} steps of {args.batch_size} "
            "rows"
        )

    def result(self, result: training.Result, experiment: Experiment) -> None:
        init, _ = functional(dataclasses.replace(experiment.model, lora_ranks=()))
        shapes = jax.eval_shape(init, jax.random.key(0))
        adamw = 8 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
        self.line(
            f"val {result.val_loss:.4f} nats a token; optimizer state {result.state_bytes:,} "
            f"bytes, {result.state_bytes / adamw:.1%} of float32 AdamW's on all parameters"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: the arguments; ``None`` takes the process's own.

    Returns:
        The exit code: 2 for what the user has to put right, 130 after Ctrl-C.
    """
    return exit_code(
        "finetune_llm", lambda: run(options.make_parser(__doc__).parse_args(argv), Console())
    )


if __name__ == "__main__":
    sys.exit(main())
