"""The optimizers that the RL example offers, and what they project, stage by stage.

Clipping stands inside, so that it limits the norm of the sketch and not of the full gradient:
what a subspace leaves out should not shrink what it keeps.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

import lowrank_optax as lro

CLASSES = ("mlp", "attention", "embedding", "head")
"""Kinds of weights that may have a rank of their own, in the order of progressive enabling."""

WARMUP = 20
"""Updates until the learning rate is reached."""

Rank = int | float | None
"""Columns, or a share of the smaller side; ``None`` trains full-rank."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says about the optimizer.

    Attributes:
        ranks: by class.
        clip: largest global norm of the sketched gradients; 0 turns clipping off.
        refresh_every: updates between two refreshes of GaLore's bases.
        scale: factor on projected updates.
        weight_decay: decoupled, times the learning rate.
        metrics: keep the fidelity of every projected weight, for the monitor.
    """

    ranks: Mapping[str, Rank] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CLASSES, 24)
    )
    clip: float = 1.0
    refresh_every: int = 100
    scale: float = 1.0
    weight_decay: float = 0.0
    metrics: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one optimizer.

    Attributes:
        learning_rate: used unless ``--lr`` says otherwise.
        make: from the inner optimizer, target rules and the `Options`.
        projected: whether it has ranks.
        matrix_free: whether it takes gradients that are only cores.
    """

    learning_rate: float
    make: Callable[[optax.GradientTransformation, Any, Options], optax.GradientTransformation]
    projected: bool = True
    matrix_free: bool = False


def _adamw(
    inner: optax.GradientTransformation, targets: Any, options: Options
) -> optax.GradientTransformation:
    del targets, options
    return inner


def _galore(
    inner: optax.GradientTransformation, targets: Any, options: Options
) -> optax.GradientTransformation:
    tracker = lro.refresh_basis(every=options.refresh_every, targets=targets)
    return lro.galore_project(inner, tracker, scale=options.scale, metrics=options.metrics)


def _logra(
    inner: optax.GradientTransformation, targets: Any, options: Options
) -> optax.GradientTransformation:
    tracker = lro.learn_basis(targets=targets)
    return lro.logra_sketch(inner, tracker, scale=options.scale, metrics=options.metrics)


RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(5e-4, _adamw, projected=False),
    "galore": Recipe(1e-3, _galore, matrix_free=True),
    "logra": Recipe(1e-3, _logra),
}
"""What ``--optimizer`` offers."""


def make_targets(ranks: Mapping[str, Rank], enabled: Sequence[str]) -> Callable[[str, Any], Rank]:
    """A rule that projects the enabled classes, each at its rank, and nothing else."""

    def target(path: str, leaf: Any) -> Rank:
        del leaf
        kind = lro.targets.leaf_class(path)
        return ranks.get(kind) if kind in enabled else None

    return target


def make(
    name: str, learning_rate: float, options: Options, enabled: Sequence[str] = CLASSES
) -> optax.GradientTransformationExtraArgs:
    """Looks an optimizer up.

    Args:
        name: a key of `RECIPES`.
        learning_rate: after the warm-up; the guard may halve the updates.
        options: the rest.
        enabled: which classes are projected by now.

    Returns:
        The transformation.
    """
    # Adam's first steps are as long as any, whatever it has seen.
    schedule = optax.linear_schedule(learning_rate / WARMUP, learning_rate, WARMUP - 1)
    inner = optax.adamw(schedule, weight_decay=options.weight_decay)
    if options.clip:
        inner = optax.chain(optax.clip_by_global_norm(options.clip), inner)
    targets = make_targets(options.ranks, enabled)
    return optax.with_extra_args_support(RECIPES[name].make(inner, targets, options))


@dataclasses.dataclass(frozen=True)
class Stages:
    """Which classes are projected from which iteration on.

    Attributes:
        ranks: by class; those without a rank are never projected.
        interval: iterations between two stages, MLP, then attention, then embedding and head; 0
            projects everything from the start.
    """

    ranks: Mapping[str, Rank]
    interval: int = 0

    def at(self, iteration: int) -> tuple[str, ...]:
        """The classes that are projected in an iteration, counted from 0."""
        groups = [("mlp",), ("attention",), ("embedding", "head")]
        groups = [[c for c in group if self.ranks.get(c) is not None] for group in groups]
        groups = [group for group in groups if group]
        count = 1 + iteration // self.interval if self.interval else len(groups)
        return tuple(name for group in groups[:count] for name in group)
