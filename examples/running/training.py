"""The training step, and the loop around it.

The step is one jitted function of arrays. What it is made of can be exchanged one by one: the
gradient function (another backward pass), the optimizer, the placement of the arguments.
"""

import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowrank_optax as lro
from model.decoder import Params
from running.errors import Interruption, UserError

Batch: TypeAlias = Any
"""Tokens, ``(batch, length + 1)``, or a pytree of arrays whose first axis is the batch."""

LossFn: TypeAlias = Callable[..., jax.Array]
"""``loss_fn(params, batch, *constants)``, a mean over the batch. Constants are arrays that are not
trained: a frozen base, a reference model."""

GradientFn: TypeAlias = Callable[..., tuple[jax.Array, Params, Mapping[str, Any]]]
"""``(params, batch, opt_state, *constants) -> loss, gradients, extra arguments for tx.update``."""

TrainStep: TypeAlias = Callable[..., tuple[Params, optax.OptState, dict[str, jax.Array]]]
"""``(params, opt_state, batch, *constants) -> params, opt_state, metrics``."""


def _micro_batches(batch: Batch, number: int) -> Batch:
    """The batch in equal parts, on a new first axis."""
    return jax.tree.map(lambda x: jnp.reshape(x, (number, -1, *x.shape[1:])), batch)


def full_gradients(loss_fn: LossFn, micro_batches: int = 1) -> GradientFn:
    """Gradients by `jax.value_and_grad`, averaged over micro-batches.

    Whatever the number of micro-batches, the optimizer sees one gradient and counts one step. Only
    one micro-batch's activations exist at a time; the sum is float32.

    Args:
        loss_fn: a mean over the batch.
        micro_batches: how many equal parts the batch is cut into.

    Returns:
        The gradient function. It needs nothing from the optimizer and passes it nothing.
    """
    value_and_grad = jax.value_and_grad(loss_fn)

    def gradients(
        params: Params, batch: Batch, opt_state: optax.OptState, *constants: Any
    ) -> tuple[jax.Array, Params, Mapping[str, Any]]:
        del opt_state
        if micro_batches == 1:
            return *value_and_grad(params, batch, *constants), {}

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            one = value_and_grad(params, part, *constants)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one), None

        parts = _micro_batches(batch, micro_batches)
        first = jax.tree.map(lambda x: x[0], parts)
        like = jax.eval_shape(value_and_grad, params, first, *constants)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        total, _ = jax.lax.scan(add, zeros, parts)
        loss, grads = jax.tree.map(lambda x, y: (x / micro_batches).astype(y.dtype), total, like)
        return loss, grads, {}

    return gradients


def compact_gradients(loss_fn: LossFn, micro_batches: int = 1) -> GradientFn:
    """Gradients by `lro.compact_value_and_grad`: of projected weights only their cores are made.

    Micro-batches share the bases of the first one, and what is summed over them is core-sized.

    Args:
        loss_fn: a mean over the batch.
        micro_batches: how many equal parts the batch is cut into.

    Returns:
        The gradient function. It reads the bases from the optimizer's state, which must hold a
        subspace optimizer, and passes on those that it used.
    """
    compact = lro.compact_value_and_grad(loss_fn)

    def gradients(
        params: Params, batch: Batch, opt_state: optax.OptState, *constants: Any
    ) -> tuple[jax.Array, Params, Mapping[str, Any]]:
        parts = _micro_batches(batch, micro_batches)
        first = jax.tree.map(lambda x: x[0], parts)
        rest = jax.tree.map(lambda x: x[1:], parts)
        loss, grads, bases = compact(params, first, *constants, opt_state=opt_state)
        if micro_batches > 1:

            def add(total: Any, part: Batch) -> tuple[Any, None]:
                loss, grads, _ = compact(params, part, *constants, opt_state=opt_state, bases=bases)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (loss, grads)), None

            like = loss, grads
            total = jax.tree.map(lambda x: x.astype(jnp.float32), like)
            total, _ = jax.lax.scan(add, total, rest)
            loss, grads = jax.tree.map(
                lambda x, y: (x / micro_batches).astype(y.dtype), total, like
            )
        return loss, grads, {"bases": bases}

    return gradients


def make_train_step(
    gradients: GradientFn,
    tx: optax.GradientTransformationExtraArgs,
    shardings: tuple[Any, Any] | None = None,
) -> TrainStep:
    """One update, jitted. The old parameters and the old state give their memory to the new ones.

    Args:
        gradients: for instance `full_gradients`.
        tx: the optimizer.
        shardings: where parameters and optimizer state are to be afterwards; ``None`` leaves it
            to the compiler.

    Returns:
        ``step(params, opt_state, batch, *constants) -> params, opt_state, metrics``. The metrics
        are the loss and the norm of the gradients, both before the update.
    """

    def step(
        params: Params, opt_state: optax.OptState, batch: Batch, *constants: Any
    ) -> tuple[Params, optax.OptState, dict[str, jax.Array]]:
        loss, grads, extra = gradients(params, batch, opt_state, *constants)
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        new: Any = optax.apply_updates(params, updates)
        return new, opt_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    out = None if shardings is None else (*shardings, None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out)


def make_evaluate(loss_fn: LossFn) -> Callable[[Params, Iterable[np.ndarray]], float]:
    """The mean loss over batches that need not be of one size."""
    jitted = jax.jit(loss_fn)

    def evaluate(params: Params, batches: Iterable[np.ndarray]) -> float:
        losses = [(float(jitted(params, batch)), len(batch)) for batch in batches]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)

    return evaluate


def count_bytes(tree: Any) -> int:
    """How many bytes the arrays of a pytree hold."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_tokens(batch: Batch) -> int:
    """How many tokens a batch predicts; of a packed one, those that belong to a text."""
    return batch[:, 1:].size if hasattr(batch, "shape") else np.count_nonzero(batch["segments"])


class StopRequest:
    """While entered, a first Ctrl-C is only noted; a second one interrupts as usual.

    An interrupt in the middle of a step would find the old parameters donated and the new ones not
    there yet, so the loop finishes the step that it is in.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = signal.SIG_DFL

    def __enter__(self) -> "StopRequest":
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)


class Batches(Protocol):
    """Data: what a `Corpus` is, or anything else whose batches are a function of the step."""

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """The training batch of one step, counted from 0, of ``size`` rows."""
        ...

    def validation_batches(self, size: int) -> Iterable[Batch]:
        """What is validated on, in batches of at most ``size`` rows."""
        ...


class Observer(Protocol):
    """Is told what happens."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after every update with everything that was measured."""
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long, on what, and how often.

    Attributes:
        steps: updates in all, those before a resumption included.
        batch_size: windows an update.
        seed: of the data order.
        eval_every: updates between two validations; there is one at the end in any case.
        save_every: updates between two checkpoints, likewise.
    """

    steps: int
    batch_size: int
    seed: int
    eval_every: int
    save_every: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run amounts to.

    Attributes:
        val_loss: at the end, in nats a byte.
        state_bytes: held by the optimizer.
        step_seconds: the median, compilation left out; ``None`` where too few steps were timed.
        params: what was trained.
    """

    val_loss: float
    state_bytes: int
    step_seconds: float | None
    params: Params


def train(
    state: tuple[Params, optax.OptState],
    start: int,
    *,
    train_step: TrainStep,
    evaluate: Callable[[Params, Iterable[Any]], float],
    corpus: Batches,
    schedule: optax.Schedule,
    settings: Settings,
    observer: Observer,
    save: Callable[[int, Any], None] | None = None,
    place: Callable[[np.ndarray], Any] = lambda batch: batch,
) -> Result:
    """Runs the updates ``start … settings.steps``.

    Args:
        state: parameters and optimizer state; donated.
        start: how many updates they have seen.
        train_step: from `make_train_step`.
        evaluate: from `make_evaluate`.
        corpus: the data.
        schedule: the learning rate, to report it.
        settings: how long and how often.
        observer: told about every update.
        save: called with the number of updates and the state whenever a checkpoint is due.
        place: puts a batch where the step wants it.

    Returns:
        The `Result`.

    Raises:
        Interruption: after Ctrl-C, once the state has been saved.
        UserError: if the loss is no longer finite; the last checkpoint stays as it was.
    """
    params, opt_state = state

    def validate(params: Params) -> float:
        return evaluate(params, map(place, corpus.validation_batches(settings.batch_size)))

    seconds: list[float] = []
    val_loss = None
    with StopRequest() as stop:
        for step in range(start, settings.steps):
            batch = corpus.batch(settings.seed, step, settings.batch_size)
            began = time.perf_counter()
            params, opt_state, measured = train_step(params, opt_state, place(batch))
            metrics = {name: float(value) for name, value in measured.items()}  # waits for them
            seconds.append(time.perf_counter() - began)
            if not math.isfinite(metrics["loss"]):
                raise UserError(
                    f"the loss is {metrics['loss']} at step {step + 1}: lower --lr, lengthen "
                    "--warmup or tighten --clip"
                )
            done = step + 1
            last = done == settings.steps
            metrics["learning_rate"] = float(jnp.asarray(schedule(step)))
            metrics["tokens_per_second"] = count_tokens(batch) / seconds[-1]
            if last or done % settings.eval_every == 0:
                val_loss = validate(params)
                metrics["val_loss"] = val_loss
            observer.step(done, metrics)
            if save and (last or stop.requested or done % settings.save_every == 0):
                save(done, (params, opt_state))
            if stop.requested and not last:
                kept = "checkpoint saved, go on with --resume" if save else "nothing was saved"
                raise Interruption(f"interrupted after step {done} of {settings.steps}; {kept}")
    if val_loss is None:  # resumed at the end: nothing left to train
        val_loss = validate(params)
    timed = seconds[1:]  # the first one compiles
    median = statistics.median(timed) if timed else None
    return Result(val_loss, count_bytes(opt_state), median, params)
