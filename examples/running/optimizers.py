"""The optimizers that the examples compare, one entry each."""

import dataclasses
from collections.abc import Callable

import optax

import lowrank_optax as lro


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says about the optimizer.

    Attributes:
        rank: of the projection; an int, or a float as a fraction of the smaller matrix side.
        refresh_every: steps between two refreshes of the bases.
        scale: factor on the projected updates; ``None`` means the recipe's own.
        weight_decay: decoupled, times the learning rate, on every parameter.
    """

    rank: int | float = 0.25
    refresh_every: int = 100
    scale: float | None = None
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one optimizer.

    Attributes:
        learning_rate: the peak that is used unless ``--lr`` says otherwise.
        make: builds it from a learning-rate schedule and the `Options`.
        projected: whether it has a rank, an interval and a scale.
    """

    learning_rate: float
    make: Callable[[optax.Schedule, Options], optax.GradientTransformation]
    projected: bool = True


def _adamw(schedule: optax.Schedule, options: Options) -> optax.GradientTransformation:
    return optax.adamw(schedule, weight_decay=options.weight_decay)


def _low_rank(
    alias: Callable[..., optax.GradientTransformation],
) -> Callable[[optax.Schedule, Options], optax.GradientTransformation]:
    def make(schedule: optax.Schedule, options: Options) -> optax.GradientTransformation:
        return alias(
            schedule,
            rank=options.rank,
            refresh_every=options.refresh_every,
            scale=0.25 if options.scale is None else options.scale,
            weight_decay=options.weight_decay,
        )

    return make


RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(2e-3, _adamw, projected=False),
    "galore": Recipe(2e-2, _low_rank(lro.galore_adamw)),
    "lowrank": Recipe(2e-2, _low_rank(lro.lowrank_adamw)),
}
"""What ``--optimizer`` offers."""


def make_schedule(peak: float, steps: int, warmup: int, shape: str) -> optax.Schedule:
    """A linear warm-up to ``peak``, then a cosine down to a tenth of it, or ``peak`` throughout.

    Args:
        peak: the largest learning rate.
        steps: how many updates there will be.
        warmup: how many of them warm up.
        shape: ``"cosine"`` or ``"constant"``.

    Returns:
        A function of the step, counted from 0.
    """
    if shape == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=0.1)
    if warmup == 0:
        return after
    # The first update happens at step 0: start one notch up, or it would do nothing.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def make(
    name: str, schedule: optax.Schedule, options: Options, clip: float
) -> optax.GradientTransformationExtraArgs:
    """Looks an optimizer up and puts gradient clipping before it.

    Args:
        name: a key of `RECIPES`.
        schedule: the learning rate.
        options: the rest.
        clip: the largest global gradient norm; 0 turns clipping off.

    Returns:
        The transformation.
    """
    optimizer = RECIPES[name].make(schedule, options)
    if clip:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)
    return optax.with_extra_args_support(optimizer)
