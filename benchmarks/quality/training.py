"""Training runs of ``quality.py``: one optimizer, many rates and seeds, all in one program.

The runs of one optimizer differ in numbers alone. So they train side by side, as lanes of one
`jax.vmap` over a whole training run, with one compilation: on a GPU twenty small models then take
hardly longer than one.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowrank_optax as lro
from benchmarks import harness
from benchmarks.quality.contenders import CONTENDERS, Setting, is_matrix
from model import decoder
from running import data
from running.optimizers import make_schedule
from running.training import count_bytes

_VALIDATION = (4, 32)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, a corpus and a length of training.

    Attributes:
        width: of the model; the feed-forward layer is three times as wide.
        layers: of the model.
        batch: sequences a step.
        length: bytes a sequence.
        steps: updates.
        corpus: a file, or "" for the standard library's source.
        clip: largest global gradient norm, 0 for none.
        decay: weight decay.
    """

    width: int = 128
    layers: int = 4
    batch: int = 8
    length: int = 128
    steps: int = 400
    corpus: str = ""
    clip: float = 0.0
    decay: float = 0.0


@functools.cache
def _corpus_of(path: str, length: int) -> data.Corpus:
    """The text, cut into training and validation windows."""
    text = pathlib.Path(path).read_bytes() if path else data.standard_library()
    return data.split(text, length)


@functools.cache
def _training_bytes(path: str, length: int, batch: int, steps: int, seed: int) -> np.ndarray:
    corpus = _corpus_of(path, length)
    return np.stack([corpus.batch(seed, step, batch) for step in range(steps)]).astype(np.uint8)


def _validation_bytes(task: Task) -> np.ndarray:
    """The first whole batches of the held-out part's windows."""
    batches, size = _VALIDATION
    corpus = _corpus_of(task.corpus, task.length)
    return np.stack(list(corpus.validation_batches(size, batches * size))).astype(np.uint8)


def _unstacked(params: Any, layers: int) -> Any:
    return params | {
        "layers": [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(layers)]
    }


def _stacked(params: Any) -> Any:
    if not isinstance(params["layers"], list):
        return params
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def _adapters(params: Any, rank: int, key: jax.Array) -> Any:
    """LoRA's pairs for every matrix, the second of each zero, and all that is no matrix."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for number, (path, leaf) in enumerate(pairs):
        if not is_matrix(path):
            leaves.append(leaf)
            continue
        *batch, m, n = leaf.shape
        down = jax.random.normal(jax.random.fold_in(key, number), (*batch, m, rank)) / m**0.5
        leaves.append({"lora_a": down, "lora_b": jnp.zeros((*batch, rank, n))})
    return jax.tree.unflatten(treedef, leaves)


def _merged(frozen: Any, trained: Any) -> Any:
    def one(path, weight, x):
        return weight + x["lora_a"] @ x["lora_b"] if is_matrix(path) else x

    # At each matrix of the one tree the other has a pair.
    return jax.tree_util.tree_map_with_path(one, frozen, trained)


class Lane:
    """One training run of a contender, as functions to compile.

    Args:
        name: a key of `CONTENDERS`.
        task: what to train.
        rank: columns of each basis.
    """

    def __init__(self, name: str, task: Task, rank: int):
        self._contender, self._task, self._rank = CONTENDERS[name], task, rank
        config = decoder.DecoderConfig.tiny(
            hidden_size=task.width,
            intermediate_size=3 * task.width,
            num_hidden_layers=task.layers,
            num_attention_heads=max(task.width // 32, 2),
            num_key_value_heads=max(task.width // 64, 1),
        )
        self._init, self._apply = decoder.functional(config)

    def _optimizer(self, rate: Any, params: Any) -> optax.GradientTransformationExtraArgs:
        setting = Setting(rate, self._rank, self._contender.every, self._task.decay)
        tx = self._contender.make(setting, params)
        if self._task.clip:
            tx = optax.chain(optax.clip_by_global_norm(self._task.clip), tx)
        return optax.with_extra_args_support(tx)

    def _loss_of(self, params: Any, tokens: jax.Array) -> jax.Array:
        logits = self._apply(_stacked(params), tokens[:, :-1])
        return decoder.next_token_loss(logits, tokens[:, 1:])

    def start(self, seed: jax.Array) -> tuple[Any, Any, Any]:
        """The first params, what stays of them (LoRA's matrices), and the optimizer's state."""
        key = jax.random.key(seed)
        frozen = params = self._init(key)
        if self._contender.adapters:
            params = _adapters(params, self._rank, jax.random.fold_in(key, 1))
        elif not self._contender.stacked:
            params = _unstacked(params, self._task.layers)
        return params, frozen, self._optimizer(lambda count: 1.0, params).init(params)

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the optimizer's state, and of AdamW's on the same model."""
        _, model, state = jax.eval_shape(self.start, jnp.zeros((), jnp.int32))
        return count_bytes(state), count_bytes(jax.eval_shape(optax.adamw(1.0).init, model))

    def train(
        self,
        peak: jax.Array,
        seed: jax.Array,
        tokens: jax.Array,
        shape: jax.Array,
        validation: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Trains from the start.

        Args:
            peak: the peak learning rate.
            seed: of the initial params.
            tokens: a batch for each step, ``(steps, batch, length + 1)``.
            shape: the learning rate over its peak at each step, ``(steps,)``.
            validation: batches to validate on.

        Returns:
            The loss of every step and the validation loss, nats a byte.
        """
        params, frozen, state = self.start(seed)

        def loss(params, tokens):
            params = _merged(frozen, params) if self._contender.adapters else params
            return self._loss_of(params, tokens.astype(jnp.int32))

        compact = lro.compact_value_and_grad(loss)

        def step(carry, inputs):
            params, state = carry
            tokens, factor = inputs
            # The optimizer's own count is that of the scan.
            tx = self._optimizer(lambda count: peak * factor, params)
            if self._contender.compact:
                value, grads, bases = compact(params, tokens, opt_state=state)
                updates, state = tx.update(grads, state, params, bases=bases)
            else:
                value, grads = jax.value_and_grad(loss)(params, tokens)
                updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(step, (params, state), (tokens, shape))
        held_out = jax.lax.map(lambda tokens: loss(params, tokens), validation)
        return losses, jnp.mean(held_out)


@contextlib.contextmanager
def shared_conditions(axis: str) -> Iterator[None]:
    """Lets `jax.lax.cond` skip a branch under `jax.vmap` when no lane takes it.

    A refresh that is due in one lane is due in all, but depends on numbers of the lane (a zero
    gradient puts it off). `jax.vmap` would therefore refresh at every step and select.

    Args:
        axis: name of the mapped axis.
    """
    plain = jax.lax.cond

    def cond(predicate, true_fun, false_fun, *operands):
        any_lane = jax.lax.pmax(jnp.asarray(predicate).astype(jnp.int32), axis) > 0

        def of_each(*operands):
            return plain(predicate, true_fun, false_fun, *operands)

        return plain(any_lane, of_each, false_fun, *operands)

    jax.lax.cond = cond
    try:
        yield
    finally:
        jax.lax.cond = plain


def run(
    name: str,
    task: Task,
    rank: int,
    lanes: Sequence[tuple[float, int]],
    lock: pathlib.Path | None = None,
) -> list[dict[str, Any]]:
    """Trains a model with one contender at several rates and seeds.

    Args:
        name: a key of `CONTENDERS`.
        task: what to train.
        rank: columns of each basis.
        lanes: peak learning rate and seed of each run. The rate warms up over a twentieth of
            the steps and falls to a tenth along a cosine.
        lock: a file to hold a lock on while training.

    Returns:
        For each lane the validation loss in nats a byte (None if training diverged), and what
        it cost. ``step_ms`` is the time of all lanes over lanes and steps, refreshes included;
        it says little where others train at the same time.
    """
    lane = Lane(name, task, rank)
    schedule = make_schedule(1.0, task.steps, task.steps // 20, "cosine")
    tokens = [
        _training_bytes(task.corpus, task.length, task.batch, task.steps, seed) for _, seed in lanes
    ]
    inputs = (
        jnp.asarray([rate for rate, _ in lanes], jnp.float32),
        jnp.asarray([seed for _, seed in lanes], jnp.int32),
        jnp.asarray(np.stack(tokens)),
        jax.vmap(schedule)(jnp.arange(task.steps)),
        jnp.asarray(_validation_bytes(task)),
    )
    together = jax.vmap(lane.train, in_axes=(0, 0, 0, None, None), axis_name="lanes")
    began = time.perf_counter()
    with shared_conditions("lanes"):
        lowered = jax.jit(together).lower(*inputs)
    program = lowered.compile()
    compiled = time.perf_counter() - began
    with harness.turn(lock):
        began, cpu = time.perf_counter(), time.process_time()
        losses, held_out = jax.block_until_ready(program(*inputs))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    losses, held_out = np.asarray(losses), np.asarray(held_out)
    state, adamw = lane.state_bytes()
    runs = task.steps * len(lanes)
    return [
        {
            "state_bytes": state,
            "adamw_bytes": adamw,
            "lanes": len(lanes),
            "compile_s": compiled,
            "seconds": seconds,
            "step_ms": 1e3 * seconds / runs,
            "step_cpu_ms": 1e3 * cpu / runs,
            "train_loss": float(np.mean(of[-20:])) if np.isfinite(of[-20:]).all() else None,
            "val_loss": float(end) if np.isfinite(of).all() and np.isfinite(end) else None,
        }
        for of, end in zip(losses, held_out, strict=True)
    ]
