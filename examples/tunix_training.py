r"""Trains a tiny model with tunix's trainers, by AdamW and in a subspace, and compares the two.

Needs `pip install -e ".[tunix]"`. The model is tunix's own Qwen3 with random weights; nothing is
downloaded. Supervised fine-tuning reads the source text of Python's standard library; GRPO rewards
answers that consist of digits.

  python examples/tunix_training.py
  python examples/tunix_training.py --trainer grpo --optimizer galore logra
  XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/tunix_training.py \
      --mesh fsdp=4,tp=2 --accumulate 2
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import tunix
from flax import nnx
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table
from tunix.models.qwen3 import model as qwen3
from tunix.sft.peft_trainer import TrainingInput
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

import lowrank_optax as lro
from running import data
from running.arguments import (
    Parser,
    add_batches,
    add_learning_rates,
    add_optimizers,
    by_name,
    check_micro_batches,
    count,
    count_or_zero,
    mesh_sizes,
    rank,
)
from running.errors import UserError, exit_code
from running.placement import make_mesh
from running.training import count_bytes

MODEL = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
)
"""A Qwen3 that a laptop trains; bytes are its tokens."""

PROMPT, ANSWER = 8, 8
"""Tokens of a prompt, at most, and of an answer that GRPO samples."""

OPTIMIZERS: dict[str, tuple[float, Callable[[float, int | float], Any]]] = {
    "adamw": (2e-3, lambda rate, rank: optax.adamw(rate)),
    "galore": (1e-2, lambda rate, rank: lro.galore_adamw(rate, rank, refresh_every=50)),
    "logra": (1e-2, lambda rate, rank: lro.logra_adamw(rate, rank)),
}
"""Learning rates, and how to make an optimizer from a rate and a rank."""


class Tokenizer:
    """Bytes, with control characters that text does not have as marks; what tunix asks for."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Text of bytes, marks left out."""
        return bytes(i for i in ids if i > self.eos_id()).decode(errors="replace")

    def pad_id(self) -> int:
        """Fills up."""
        return 0

    def bos_id(self) -> int:
        """Begins a text."""
        return 1

    def eos_id(self) -> int:
        """Ends a text."""
        return 2


def make_model(seed: int, mesh: Mesh | None = None) -> qwen3.Qwen3:
    """A model with random weights, placed as its own annotations say.

    Args:
        seed: of the weights.
        mesh: with axes ``fsdp`` and ``tp``; ``None`` for one device.

    Returns:
        The model.
    """

    @nnx.jit
    def create() -> qwen3.Qwen3:
        model = qwen3.Qwen3(MODEL, rngs=nnx.Rngs(seed))
        params = nnx.state(model, nnx.Param)
        # tunix leaves MLPs at zero for a checkpoint to fill. From there they have no gradient.
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        leaves = [
            jax.random.normal(key, leaf.shape, leaf.dtype) * 0.05 if leaf.ndim > 1 else leaf
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        params = jax.tree.unflatten(treedef, leaves)
        if mesh is not None:
            params = jax.lax.with_sharding_constraint(params, nnx.get_partition_spec(params))
        nnx.update(model, params)
        return model

    with within(mesh):
        return create()


@contextlib.contextmanager
def within(mesh: Mesh | None) -> Iterator[None]:
    """The context from which tunix reads the mesh; `jax.set_mesh` does not reach it."""
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(mesh)
        yield


def place_state(trainer: tunix.PeftTrainer) -> None:
    """Tells tunix where the optimizer's state belongs. It moves it there before the first step.

    By itself tunix follows the annotations of the state, which mirror those of the weights: a core
    lies on one of the two mesh axes of its weight and is repeated along the other. Here it is
    divided along both, so that a device holds its share of the state and no more.

    Args:
        trainer: that has not trained yet; for GRPO, ``RLCluster.actor_trainer``.
    """
    optimizer = trainer.optimizer
    shardings = lro.state_shardings(optimizer.tx, nnx.state(trainer.model, nnx.Param))

    def annotate(variable: nnx.Variable, sharding: Any) -> None:
        spec = getattr(sharding, "spec", None)  # none on a single device
        if spec is not None:
            variable.set_metadata(out_sharding=tuple(spec))

    jax.tree.map(
        annotate, optimizer.opt_state, shardings, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves behind.

    Attributes:
        history: losses of SFT, or mean rewards of GRPO, one a step.
        trainer: tunix's, which has the model and the optimizer with its state.
    """

    history: np.ndarray
    trainer: tunix.PeftTrainer

    @property
    def opt_state(self) -> Any:
        """The optimizer's state: arrays only, in optax's own structure."""
        return nnx.as_pure(self.trainer.optimizer.opt_state)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state."""
        return sum(x.nbytes for x in jax.tree.leaves(self.opt_state))

    @property
    def device_bytes(self) -> int:
        """What of it the first device holds."""
        device = jax.devices()[0]
        return sum(
            shard.data.nbytes
            for x in jax.tree.leaves(self.opt_state)
            for shard in x.addressable_shards
            if shard.device == device
        )


def batches(args: argparse.Namespace) -> Iterator[TrainingInput]:
    """Micro-batches of source text."""
    corpus = data.split(data.standard_library(), args.seq_len)
    for step in range(args.steps * args.accumulate):
        tokens = corpus.batch(args.seed, step, args.batch_size // args.accumulate)
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def model_input(batch: TrainingInput) -> dict[str, Any]:
    """What tunix's loss takes, from a batch."""
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": build_positions_from_mask(batch.input_mask),
        "attention_mask": make_causal_attn_mask(batch.input_mask),
    }


def train_sft(args: argparse.Namespace, tx: Any, mesh: Mesh | None) -> Result:
    """Supervised training.

    Args:
        args: the options.
        tx: the optimizer.
        mesh: where the model lies.

    Returns:
        What came of it.
    """
    config = tunix.TrainingConfig(
        eval_every_n_steps=args.steps,
        gradient_accumulation_steps=args.accumulate if args.accumulate > 1 else None,
    )
    with within(mesh):
        trainer = tunix.PeftTrainer(make_model(args.seed, mesh), tx, config)
        trainer.with_gen_model_input_fn(model_input)
        place_state(trainer)
        trainer.train(batches(args))
    return Result(trainer.metrics_logger.get_metric_history("", "loss", "train"), trainer)


def digits(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The reward: the share of an answer's places that hold a digit."""
    del prompts
    return [sum(c in "0123456789" for c in text) / ANSWER for text in completions]


def train_grpo(args: argparse.Namespace, tx: Any, mesh: Mesh | None) -> Result:
    """Group relative policy optimization, with tunix's own sampler.

    Args:
        args: the options.
        tx: the actor's optimizer.
        mesh: of actor, reference and sampler alike.

    Returns:
        What came of it.
    """
    if mesh is None:  # tunix wants one
        types = (AxisType.Auto, AxisType.Auto)
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), types, devices=jax.devices()[:1])
    roles = (tunix.Role.ACTOR, tunix.Role.REFERENCE, tunix.Role.ROLLOUT)
    config = tunix.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=tunix.RLTrainingConfig(
            actor_optimizer=tx,
            eval_every_n_steps=args.steps,
            max_steps=args.steps,
            mini_batch_size=args.batch_size,
            train_micro_batch_size=(
                args.batch_size // args.accumulate if args.accumulate > 1 else None
            ),
        ),
        rollout_config=tunix.RolloutConfig(
            max_prompt_length=PROMPT,
            max_tokens_to_generate=ANSWER,
            kv_cache_size=2 * (PROMPT + ANSWER),
            temperature=1.0,
        ),
    )
    rewards = []

    def reward(prompts: Sequence[str], completions: Sequence[str], **kwargs: Any) -> list[float]:
        values = digits(prompts, completions, **kwargs)
        rewards.append(np.mean(values))
        return values

    cluster = tunix.RLCluster(
        actor=make_model(args.seed, mesh),
        reference=make_model(args.seed, mesh),
        tokenizer=Tokenizer(),
        cluster_config=config,
    )
    place_state(cluster.actor_trainer)
    learner = tunix.GRPOLearner(
        rl_cluster=cluster,
        algo_config=tunix.GRPOConfig(num_generations=args.generations, beta=0.01),
        reward_fns=reward,
    )
    rng = np.random.default_rng(args.seed)
    asked = rng.integers(0, 100, (args.steps, args.batch_size, 2))
    # An array: tunix would repeat the strings of a list one by one.
    learner.train({"prompts": np.array([f"{a}+{b}=" for a, b in batch])} for batch in asked)
    return Result(np.reshape(rewards, (args.steps, -1)).mean(axis=1), cluster.actor_trainer)


def accumulated(tx: Any, steps: int) -> Any:
    """What tunix makes of an optimizer that is to see the mean of several micro-batches."""
    return optax.MultiSteps(tx, steps) if steps > 1 else tx


TRAINERS = {"sft": train_sft, "grpo": train_grpo}


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--trainer", choices=TRAINERS, default="sft", help="tunix's (%(default)s)")
    add_optimizers(add, OPTIMIZERS, ["adamw", "galore"])
    add("--rank", type=rank, default=0.25, help="or share of the smaller side (%(default)s)")
    add_learning_rates(add, OPTIMIZERS)
    add("--steps", type=count, default=40, help="updates (%(default)s)")
    add_batches(add, "windows or prompts")
    add("--seq-len", type=count, default=64, help="bytes a window, SFT (%(default)s)")
    add("--generations", type=count, default=8, help="answers a prompt, GRPO (%(default)s)")
    add("--mesh", type=mesh_sizes, metavar="AXIS=SIZE,...", help="fsdp and tp (one device)")
    add("--seed", type=count_or_zero, default=0, help="of weights and data (%(default)s)")
    add("--describe", action="store_true", help="first print what is projected")
    return parser


def run(args: argparse.Namespace, console: Console) -> dict[str, Result]:
    """Trains with every optimizer in turn and prints the comparison.

    Args:
        args: the options.
        console: where to print.

    Returns:
        What came of it, by optimizer.
    """
    check_micro_batches(args)
    if args.generations < 2:
        raise UserError("--generations 1 leaves nothing to compare an answer with: take 2 or more")
    mesh = None
    if args.mesh is not None:
        if set(args.mesh) != {"fsdp", "tp"}:
            raise UserError(
                "--mesh needs the axes that tunix's models name: give both, such as fsdp=4,tp=2"
            )
        mesh = make_mesh(args.mesh)
    params = nnx.state(nnx.eval_shape(lambda: make_model(args.seed)), nnx.Param)
    adamw = accumulated(optax.adamw(1.0), args.accumulate)
    adamw_bytes = count_bytes(jax.eval_shape(adamw.init, params))
    rates = by_name(args.lr, {name: rate for name, (rate, _) in OPTIMIZERS.items()})
    results = {}
    for name in args.optimizer:
        _, make = OPTIMIZERS[name]
        tx = make(rates[name], args.rank)
        if args.describe and name != "adamw":
            console.print(str(lro.describe(tx, params)), highlight=False, soft_wrap=True)
        results[name] = TRAINERS[args.trainer](args, tx, mesh)
        shown = "  ".join(f"{x:.3f}" for x in results[name].history[:: max(args.steps // 8, 1)])
        console.print(f"{name:>8}  {shown}", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("optimizer")
    measured = "loss" if args.trainer == "sft" else "reward"
    for heading in (f"first {measured}", "last", "state bytes", "of AdamW's", "on device 0"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        ends = [f"{np.mean(part):.3f}" for part in (result.history[:1], result.history[-4:])]
        size = result.state_bytes
        table.add_row(
            name, *ends, f"{size:,}", f"{size / adamw_bytes:.1%}", f"{result.device_bytes:,}"
        )
    console.print(table)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: the arguments; ``None`` takes the process's own.

    Returns:
        The exit code: 2 for what the user has to put right, 130 after Ctrl-C.
    """
    return exit_code("tunix_training", lambda: run(make_parser().parse_args(argv), Console()))


if __name__ == "__main__":
    sys.exit(main())
