"""Reading the collectives out of a compiled program's text."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*->.*\{\s*$")
_COLLECTIVE = re.compile(rf"=\s*(.*?)\s({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count\D+(\d+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: one of ``KINDS``.
        bytes: what it reduces, gathers or moves on one device, the larger of operand and result.
        times: how often it runs in a step, loops counted.
        shape: of its largest array.
    """

    kind: str
    bytes: int
    times: int
    shape: tuple[int, ...]


def _arrays(text: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of each array in a type such as ``(bf16[2,3]{1,0}, f32[])``."""
    found = []
    for dtype, dims in _ARRAY.findall(text):
        shape = tuple(int(size) for size in dims.split(",") if size)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
        found.append((math.prod(shape) * bits // 8, shape))
    return found


def _collective(line: str) -> Collective | None:
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    types, kind, started = match.groups()
    arrays = _arrays(types)
    if started and kind != "all-reduce":
        # The start of an asynchronous one returns operands, results and small handles.
        arrays = [a for a in arrays if a[1]]
        half = len(arrays) // 2
        arrays = arrays[:half] if kind == "reduce-scatter" else arrays[half:]
    size = sum(a[0] for a in arrays)
    if kind == "reduce-scatter" and not started:
        group = _GROUP.search(line)
        if group is not None:
            size *= int(group[2]) if group[2] else len(group[1].split(","))
    largest = max(arrays, default=(0, ()))[1]
    return Collective(kind, size, 1, largest)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of each computation by name, and the name of the entry."""
    lines: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head[2]
            lines[current] = []
            entry = current if head[1] else entry
        elif current is not None:
            lines[current].append(line)
    return lines, entry


def collectives(text: str, refreshing: bool = False) -> list[Collective]:
    """Every collective that one run of a compiled program executes.

    A branch counts as its cheapest alternative: in this library branches are refreshes, which few
    steps take. What is in a loop counts as often as the loop runs, once where that is not known.

    Args:
        text: ``compiled.as_text()``.
        refreshing: count branches as their costliest alternative instead.
    """
    pick = max if refreshing else min
    lines, entry = _computations(text)
    done: dict[str, list[Collective]] = {}

    def total(found: Iterable[Collective]) -> int:
        return sum(c.bytes * c.times for c in found)

    def bounds(name: str) -> list[int]:
        """The integers that a computation, and what it calls, compares with."""
        here = lines.get(name, ())
        found = [int(n) for line in here for n in _CONSTANT.findall(line)]
        called = [c for line in here for c in _CALLED.findall(line)]
        return found + [n for c in called for n in bounds(c)]

    def trips(line: str) -> int:
        said, condition = _TRIPS.search(line), _CONDITION.search(line)
        if said:
            return int(said[1])
        # A scan's condition compares its counter with the length, and nothing else.
        limits = bounds(condition[1]) if condition else []
        return limits[0] if len(limits) == 1 else 1

    def of(name: str) -> list[Collective]:
        if name in done:
            return done[name]
        found: list[Collective] = []
        for line in lines.get(name, ()):
            own = _collective(line)
            if own is not None:
                found.append(own)
                continue
            branches = _BRANCHES.search(line)
            if branches:
                names = [b.strip().lstrip("%") for b in branches[1].split(",")]
                found.extend(pick((of(b) for b in names), key=total))
                continue
            called = _CALLED.findall(line)
            if "true_computation=" in line:
                found.extend(pick((of(c) for c in called), key=total))
                continue
            times = trips(line) if "body=" in line else 1
            for name_called in called:
                inner = of(name_called)
                found.extend(c._replace(times=c.times * times) for c in inner)
        done[name] = found
        return found

    return of(entry) if entry is not None else []


def bytes_by_kind(found: Iterable[Collective]) -> Mapping[str, int]:
    """Bytes a step, by kind; kinds that do not occur are left out."""
    sums: dict[str, int] = {}
    for c in found:
        sums[c.kind] = sums.get(c.kind, 0) + c.bytes * c.times
    return sums
