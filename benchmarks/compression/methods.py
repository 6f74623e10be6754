"""Ways to compress gradients or moments, each with what it makes of a gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro
from benchmarks.compression import baselines
from benchmarks.compression.task import Size, make_task

# What became of a gradient: from (gradients, state before, state after) to the pair of trees
# (true, compressed).


def _untouched(grads, before, after):
    del before, after
    return grads, grads


def _first_of_chain(transform):
    def seen(grads, before, after):
        del after
        return grads, transform.update(grads, before[0])[0]

    return seen


def _rounded_moment(grads, before, after):
    exact, _ = baselines.next_moments(grads, before[0], 0.9, 0.999)
    stored, _ = baselines.moments(after[0], grads)
    return exact, stored


def _projected(grads, before, after):
    del before
    tracker = after.tracker_state
    product = functools.partial(jnp.matmul, precision="highest")

    def seen(gradient, reduction, output):
        # A side without a basis holds no array.
        if isinstance(reduction, jax.Array):
            gradient = product(reduction, product(reduction.mT, gradient))
        if isinstance(output, jax.Array):
            gradient = product(product(gradient, output), output.mT)
        return gradient

    return grads, jax.tree.map(seen, grads, tracker.reduction_basis, tracker.output_basis)


def scaled_table(width: int) -> dict[str, int]:
    """LoGRA's ranks (128, 64, 32 and 256, for a model of width 512 or so) at this width."""
    ranks = {"embedding": 128, "attention": 64, "mlp": 32, "head": 256}
    return {name: max(1, rank * width // 512) for name, rank in ranks.items()}


def uniform_rank(size: Size) -> int:
    """The one rank whose optimizer state is nearest to the table's in bytes."""
    init, _, _ = make_task(size)
    params = jax.eval_shape(init, jax.random.key(0))

    def state_bytes(ranks: dict[str, int]) -> int:
        return lro.describe(
            lro.logra_adamw(1.0, targets=lro.targets.logra(**ranks)), params
        ).state_bytes

    wanted = state_bytes(scaled_table(size.width))

    def excess(rank: int) -> int:
        return abs(state_bytes(dict.fromkeys(scaled_table(size.width), rank)) - wanted)

    return min(range(1, size.width // 2), key=excess)


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to compress.

    Attributes:
        make: an optimizer from a learning-rate schedule.
        seen: what became of a gradient.
    """

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    seen: Callable[..., tuple[Any, Any]]


def methods(size: Size) -> dict[str, Method]:
    """All of them by name."""
    tenth = baselines.sparsify_top_k(0.1, error_feedback=False)
    tenth_ef = baselines.sparsify_top_k(0.1, error_feedback=True)
    fp8 = baselines.scale_by_adam_fp8()
    quarter, half = size.width // 4, size.width // 2
    table = lro.targets.logra(**scaled_table(size.width))
    one = uniform_rank(size)
    uniform = lro.targets.logra(**dict.fromkeys(scaled_table(size.width), one))

    def after(first):
        return lambda rate: optax.chain(first, optax.adam(rate))

    def logra(**options):
        return lambda rate: lro.logra_adamw(rate, **options)

    return {
        "Adam": Method(optax.adam, _untouched),
        "Adam, FP8 moments": Method(
            lambda rate: optax.chain(fp8, optax.scale_by_learning_rate(rate)), _rounded_moment
        ),
        "top 10 %, then Adam": Method(after(tenth), _first_of_chain(tenth)),
        "top 10 % with error feedback, then Adam": Method(
            after(tenth_ef), _first_of_chain(tenth_ef)
        ),
        f"GaLore, rank {quarter}": Method(
            lambda rate: lro.galore_adamw(rate, quarter, refresh_every=50, scale=1.0), _projected
        ),
        f"LoGRA, rank {quarter}": Method(logra(rank=quarter), _projected),
        f"LoGRA, rank {half}": Method(logra(rank=half), _projected),
        "LoGRA, ranks by layer": Method(logra(targets=table), _projected),
        f"LoGRA, rank {one} in the same layers": Method(logra(targets=uniform), _projected),
    }
