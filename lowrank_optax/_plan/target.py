"""What a user may say about one leaf, and how a table of it is read."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.tree import PyTreeDef
from lowrank_optax._checks import Rank, check_choice, check_rank
from lowrank_optax._plan.layouts import Kind

SIDES = ("smaller", "larger", "reduction", "output", "both")


@dataclasses.dataclass(frozen=True)
class Target:
    """A leaf that is projected.

    Attributes:
        rank: columns of the basis, an int; or a float in (0, 1], a fraction of the smaller
            matrix side; or None for the tracker's own ``rank``.
        reduction_axis: axis or axes that the layer sums over, the input of ``x @ W``. None
            reads the view off the leaf's path, as the default rule does.
        output_axis: axis or axes that the layer produces. Axes named on neither side are
            batch axes: scanned layers, experts.
        side: which side the basis lives on, or None for the tracker's own ``side``. One of
            ``"smaller"``, ``"larger"``, ``"reduction"``, ``"output"``, ``"both"``.

    Example:
        >>> import lowrank_optax as lro
        >>> tracker = lro.refresh_basis(
        ...     rank=64,
        ...     targets=[
        ...         ("attention/(query|key|value)", lro.Target(16, 0, (1, 2))),
        ...         ("mlp", 32),
        ...         (".*", None),
        ...     ],
        ... )
    """

    rank: Rank | None = None
    reduction_axis: int | Sequence[int] | None = None
    output_axis: int | Sequence[int] | None = None
    side: str | None = None

    def __post_init__(self):
        if self.rank is not None:
            check_rank(self.rank, "Target: rank")
        if self.side is not None:
            check_choice("Target: side", self.side, SIDES)
        if (self.reduction_axis is None) != (self.output_axis is None):
            given = "reduction_axis" if self.output_axis is None else "output_axis"
            raise ValueError(
                f"Target: only {given} was given; give both reduction_axis and output_axis, "
                "or neither to read the view off the leaf's path"
            )
        for name in ("reduction_axis", "output_axis"):
            axes = getattr(self, name)
            if axes is not None and not isinstance(axes, int):
                object.__setattr__(self, name, tuple(axes))


class ByDefault(Target):
    """A target that stands for what the default rule decides."""


# One leaf's entry: a target, optax's dimension numbers, a bare rank, or None.
TargetLike = Any
# A list of (regex, entry) rules, a pytree of entries, a callable (path, leaf) -> entry, or None.
Targets = Any


def as_target(entry: TargetLike, path: str) -> Target | None:
    """Reads one leaf's entry: a Target, dimension numbers, a bare rank, or None."""
    if entry is None or isinstance(entry, Target):
        return entry
    if hasattr(entry, "reduction_axis") and hasattr(entry, "output_axis"):
        # optax's MuonDimensionNumbers and GaLoreDimensionNumbers, whichever optax has.
        return Target(None, entry.reduction_axis, entry.output_axis)
    try:
        check_rank(entry, "rank")
        return Target(entry)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{path!r}: a target is a lro.Target, a rank, optax dimension numbers or None; "
            f"got {entry!r} ({error})"
        ) from None


def is_entry(x: object) -> bool:
    """Whether ``x`` is one leaf's entry in a pytree of them."""
    return x is None or isinstance(x, Target) or hasattr(x, "reduction_axis")


class OptionalPattern(str):
    """A regex of a preset, which is written for many models and need not match this one."""


class OfKind(OptionalPattern):
    """The name of a kind, where a preset takes the leaves that the default rule finds of it.

    It is matched with a leaf's kind and not with its path, which does not tell every head.
    """


class Table:
    """A list of ``(regex, entry)`` rules of which the first match decides.

    The regex is searched in the leaf's path, ``decoder/layers/q/kernel``.

    Attributes:
        rules: pairs of a compiled regex and a target or None.
        kinds: for each rule the kind of leaf that it takes, or None where the regex decides.
        optional: for each rule whether it may match nothing without a warning.
    """

    def __init__(self, rules: Sequence[Any]):
        self.rules = []
        self.kinds = []
        self.optional = []
        for number, rule in enumerate(rules):
            if not (isinstance(rule, tuple | list) and len(rule) == 2):
                raise TypeError(
                    f"targets[{number}] must be a pair (regex, rank | Target | None), got {rule!r}"
                )
            pattern, entry = rule
            if not isinstance(pattern, str):
                raise TypeError(
                    f"targets[{number}]: the regex of a rule must be a string, got {pattern!r}"
                )
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"targets[{number}]: {pattern!r} is no regular expression: {error}"
                ) from None
            self.rules.append((compiled, as_target(entry, pattern)))
            self.kinds.append(Kind(str(pattern)) if isinstance(pattern, OfKind) else None)
            self.optional.append(isinstance(pattern, OptionalPattern))

    def match(self, path: str, kind: Kind) -> int | None:
        """The number of the first rule that matches a leaf, or None."""
        for number, ((pattern, _), wanted) in enumerate(zip(self.rules, self.kinds, strict=True)):
            if pattern.search(path) if wanted is None else kind is wanted:
                return number
        return None


def is_table(targets: Targets) -> bool:
    """Whether ``targets`` is a list of rules, as opposed to a pytree of entries.

    A single string where a pattern would stand makes it one, so that a slip in another rule is
    reported as that.
    """
    if not isinstance(targets, list | tuple) or hasattr(targets, "_fields"):
        return False
    return not targets or any(
        isinstance(rule, str)
        or (isinstance(rule, list | tuple) and len(rule) > 0 and isinstance(rule[0], str))
        for rule in targets
    )


def entries_of_tree(targets: Any, treedef: PyTreeDef, paths: Sequence[str]) -> list[Target | None]:
    """Reads a pytree of entries that is parallel to params."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(targets, is_leaf=is_entry)
    given = [tree.path_name(path) for path, _ in pairs]
    if given != list(paths):
        odd = sorted(set(paths) ^ set(given))
        raise ValueError(
            f"targets is a tree of {len(given)} entries for params with {len(paths)} leaves"
            + (f"; they differ at {odd[0]!r}" if odd else "")
            + ". Give one Target or None for each leaf, a list of (regex, rank) rules, "
            f"or a callable (path, leaf) -> Target | None. Got {structure}, params {treedef}"
        )
    return [as_target(entry, path) for path, (_, entry) in zip(paths, pairs, strict=True)]
