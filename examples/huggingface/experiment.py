"""What the command line of `finetune_llm.py` asks for, resolved and checked."""

import argparse
import dataclasses
import pathlib
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from huggingface.chat import Example, load_tokenizer, read_examples
from huggingface.config import find_model, read_config
from huggingface.options import check
from huggingface.packing import PackedData, hold_out
from huggingface.weights import check_export
from model import lora
from model.config import DecoderConfig
from model.master_weights import PRECISIONS
from running import optimizers, placement
from running.errors import UserError


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the command line asks for, resolved and checked.

    Attributes:
        args: the options.
        directory: of the checkpoint to start from.
        data: packed examples.
        model: the shape, with adapters.
        mesh: of devices, if there is one.
        steps: updates.
        warmup: how many of them warm up.
        optimizer: what the optimizer is told.
        peak: its learning rate.
        lora_peak: that of adapters.
    """

    args: argparse.Namespace
    directory: pathlib.Path
    data: PackedData
    model: DecoderConfig
    mesh: Mesh | None
    steps: int
    warmup: int
    optimizer: optimizers.Options
    peak: float
    lora_peak: float


def prepare(args: argparse.Namespace, console: Console) -> Experiment:
    """Resolves the options, reads the data, and writes nothing.

    Args:
        args: what the parser returned.
        console: where to say what was left out.

    Returns:
        The experiment.

    Raises:
        ImportError: if an option needs a library that is not installed.
        UserError: if something cannot be what the user wants.
    """
    ranks = check(args)
    if args.quantize:
        lora.require_qwix()
    directory = find_model(args.model)
    if args.export is not None:
        check_export(args.export, directory, args.overwrite)
    model = read_config(
        directory,
        remat=True,
        lora_ranks=ranks,
        lora_alpha=args.lora_alpha or 16.0,
        param_dtype=PRECISIONS[args.precision],
        dtype=PRECISIONS[args.precision],
    )
    if args.seq_len > model.max_position_embeddings:
        raise UserError(
            f"--seq-len {args.seq_len} is more than the model's max_position_embeddings "
            f"{model.max_position_embeddings}: give a smaller one"
        )
    mesh = placement.make_mesh(args.mesh) if args.mesh else None
    rows = args.batch_size // args.accumulate
    if mesh is not None and rows % placement.row_parts(mesh):
        raise UserError(
            f"{rows} rows of a micro-batch do not divide over the {placement.row_parts(mesh)} "
            "parts of --mesh: change --batch-size or --accumulate"
        )
    data = read_data(args, directory, console)
    steps = args.steps or -(-len(data.rows) * (args.epochs or 1) // args.batch_size)
    warmup = steps // 20 if args.warmup is None else args.warmup
    if warmup >= steps:
        raise UserError(f"--warmup {warmup} leaves nothing of {steps} steps: warm up for less")
    return Experiment(
        args=args,
        directory=directory,
        data=data,
        model=model,
        mesh=mesh,
        steps=steps,
        warmup=warmup,
        optimizer=optimizers.Options(
            rank=args.rank or 128,
            refresh_every=args.refresh_every or 200,
            scale=args.scale,
            weight_decay=args.weight_decay,
        ),
        peak=args.lr or (1e-4 if optimizers.RECIPES[args.optimizer].projected else 2e-5),
        lora_peak=args.lora_lr or 2e-4,
    )


def read_data(args: argparse.Namespace, directory: pathlib.Path, console: Console) -> PackedData:
    """The examples to train and to validate on.

    Raises:
        UserError: if a line cannot be used.
    """
    tokenizer = load_tokenizer(directory)

    def read(path: pathlib.Path) -> list[Example]:
        examples = read_examples(path, tokenizer)
        fitting = [example for example in examples if example.length <= args.seq_len]
        if not args.drop_long or len(fitting) == len(examples):
            return examples
        if not fitting:
            raise UserError(f"no example of '{path}' fits into --seq-len {args.seq_len}")
        console.print(
            f"left out {len(examples) - len(fitting)} of {len(examples)} examples of {path}: more "
            f"than {args.seq_len} tokens",
            highlight=False,
            soft_wrap=True,
        )
        return fitting

    if args.validation is not None:
        return PackedData(read(args.data), read(args.validation), args.seq_len)
    return PackedData(*hold_out(read(args.data)), args.seq_len)


def fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Everything that decides what a run computes, for comparison when it is resumed."""
    args = experiment.args
    return {
        "base": {
            file.name: file.stat().st_size
            for file in sorted(experiment.directory.glob("model*.safetensors"))
        },
        "model": dataclasses.asdict(experiment.model),
        "precision": args.precision,
        "quantize": args.quantize,
        "data": experiment.data.fingerprint,
        "optimizer": {
            "name": args.optimizer,
            "lr": experiment.peak,
            "lora_lr": experiment.lora_peak if args.lora else None,
            "clip": args.clip,
            "matrix_free": args.matrix_free,
            **dataclasses.asdict(experiment.optimizer),
        },
        "schedule": args.schedule,
        "warmup": experiment.warmup,
        # The length shapes a cosine; a constant schedule may be prolonged.
        "steps": experiment.steps if args.schedule == "cosine" else None,
        "batch_size": args.batch_size,
        "accumulate": args.accumulate,
        "seed": args.seed,
    }
