"""Warns while training when low-rank gradients lose too much.

    python examples/monitor.py --rank 4 --min-snr 2

`Monitor` is the part to copy: call it after an update with the step and the optimizer's state.
What is a good threshold depends on the gradients. An effective snr of 50 is a distortion of 2 %,
which few gradients allow at a rank that saves memory; 99.57 % of the energy is an snr of 15.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """What is still fine, for the leaf where it is worst.

    Attributes:
        min_snr: of ``effective_snr``, the norm of what is kept over that of what is lost.
        min_norm_ratio: of the sketch's norm over the gradient's.
        max_norm_ratio: likewise; above 1 only if bases are not orthonormal.
        max_sign_flips: share of entries whose sign is another than the gradient's.
    """

    min_snr: float = 1.0
    min_norm_ratio: float = 0.7
    max_norm_ratio: float = 1.2
    max_sign_flips: float = 0.3


def complaints(opt_state: Any, thresholds: Thresholds) -> list[str]:
    """What the last update's metrics say against, one sentence each.

    Args:
        opt_state: of an optimizer built with ``metrics=True``.
        thresholds: what is still fine.

    Returns:
        Sentences that name the leaf; none if all is fine, or before the first update.
    """
    report = lro.metrics(opt_state)
    limits = [
        ("effective_snr", thresholds.min_snr, False),
        ("grad_norm_ratio", thresholds.min_norm_ratio, False),
        ("grad_norm_ratio", thresholds.max_norm_ratio, True),
        ("sign_flip_rate", thresholds.max_sign_flips, True),
    ]
    sentences = []
    for field, limit, upper in limits:
        values = {path: float(getattr(leaf, field)) for path, leaf in report.leaves.items()}
        leaf = (max if upper else min)(values, key=lambda path: values[path])
        value = values[leaf]
        if value > limit if upper else value < limit:
            where = "above" if upper else "below"
            sentences.append(f"{leaf}: {field} is {value:.3g}, {where} {limit:g}")
    return sentences


@dataclasses.dataclass
class Monitor:
    """A hook for a training loop.

    Attributes:
        thresholds: what is still fine.
        every: steps between two looks; each one waits for the device.
        warn: what to do with a sentence, by default ``warnings.warn``.
    """

    thresholds: Thresholds
    every: int = 1
    warn: Callable[[str], Any] = warnings.warn

    def __call__(self, step: int, opt_state: Any) -> None:
        """Looks at the state after an update, if it is time to."""
        if step % self.every == 0:
            for sentence in complaints(opt_state, self.thresholds):
                self.warn(f"step {step}: {sentence}")


def problem(width: int, seed: int) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """A two-layer network that learns another one: its params and its loss for a key."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(width, 2 * width), (2 * width, width)]
    teacher = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys[:2], shapes, strict=True)]
    start = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys[2:], shapes, strict=True)]

    def network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights[0]) @ weights[1]

    def loss(params: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (64, width))
        return jnp.mean((network([params["up"], params["down"]], x) - network(teacher, x)) ** 2)

    return dict(zip(("up", "down"), start, strict=True)), loss


def main(arguments: list[str] | None = None) -> float:
    """Trains and monitors.

    Args:
        arguments: of the command line.

    Returns:
        The last loss.
    """
    defaults = Thresholds()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Thresholds):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=float, default=getattr(defaults, field.name))
    args = parser.parse_args(arguments)

    params, loss_fn = problem(args.width, args.seed)
    tx = lro.logra_adamw(args.lr, rank=args.rank, targets=[("", args.rank)], metrics=True)
    opt_state = tx.init(params)
    names = [field.name for field in dataclasses.fields(Thresholds)]
    thresholds = Thresholds(**{name: getattr(args, name) for name in names})
    monitor = Monitor(thresholds, args.every, print)

    @jax.jit
    def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    loss = jnp.inf
    for number in range(1, args.steps + 1):
        key = jax.random.fold_in(jax.random.key(args.seed), number)
        params, opt_state, loss = step(params, opt_state, key)
        monitor(number, opt_state)
    print(lro.metrics(opt_state))
    print(f"loss {float(loss):.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
