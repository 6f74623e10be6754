"""Reading the axes of a weight off its path and shape.

Frameworks store a linear layer's weight in a handful of layouts. This module knows them:
plain kernels, Flax ``MultiHeadAttention`` (Linen and NNX), tunix and MaxText einsum
kernels, ``nn.scan`` and NNX stacks, experts. What it does not know it says.
"""

import enum
import re
from collections.abc import Sequence
from typing import NamedTuple

from lowrank_optax._view import View, make_view


class Kind(enum.Enum):
    """What a leaf is to a linear layer."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"
    UNKNOWN = "unknown"


class Layout(NamedTuple):
    """A leaf's kind and, for all but vectors and unknown layouts, its view."""

    kind: Kind
    view: View | None


_VECTOR = re.compile(r"^(bias|b|scale|gamma|beta|offset|b_\w+|\w+_bias)$")
_NORM = re.compile(r"(^|_)(rms|layer|group|batch|q|k)?_?(norm|ln)(\d|_|$)|norm$|^ln\w?$", re.I)
_EMBEDDING = re.compile(r"embed|^w[tp]e$|vocab|^tok(en)?s?$", re.I)
_HEAD = re.compile(r"^(lm_?head|head|unembed(ding)?|logits(_dense)?|classifier|score)$", re.I)
_CONTAINER = re.compile(r"^(\w*layers|\w*blocks|stack|stacked|scan\w*|repeat(ed)?|h)$", re.I)
_EXPERTS = re.compile(r"expert|moe|mixture", re.I)
_ATTENTION_IN = re.compile(r"^(w?_?(q|k|v|qkv|kv)(_proj)?|query|key|value|to_[qkv]+)$", re.I)
_ATTENTION_OUT = re.compile(r"^(w?o|out|o_proj|out_proj|output|to_out)$", re.I)
# Names of the array itself; the layer's name is the component before.
_ARRAY = re.compile(r"^(kernel|w|weight|weights|value|raw_value)$", re.I)

# Einsum layers of Gemma and its kin: (reduction axes, output axes) after any stacking axis.
_EINSUM = {
    "q_einsum": ((1,), (0, 2)),  # (heads, d, head_dim)
    "kv_einsum": ((2,), (0, 1, 3)),  # (2, heads, d, head_dim)
    "qkv_einsum": ((2,), (0, 1, 3)),
    "attn_vec_einsum": ((0, 1), (2,)),  # (heads, head_dim, d)
    "gating_einsum": ((1,), (2,)),  # (2, d, f): two matrices, in either order of d and f
}


def _layer_name(parts: Sequence[str]) -> str:
    names = [part for part in parts if not _ARRAY.match(part)]
    return names[-1] if names else ""


def _is_vector_name(parts: Sequence[str]) -> bool:
    return bool(_VECTOR.match(parts[-1])) or any(_NORM.search(part) for part in parts[-2:])


def stack_axes(paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """For each leaf the axis that ``nn.scan`` or an NNX stack added, or None.

    A subtree is stacked if all its leaves have the same size at one axis (0, or 1 as
    MaxText does it) and either it holds norm scales of two axes, which are vectors
    otherwise, or its name is that of a container and no layer number follows.
    """
    result: list[int | None] = [None] * len(paths)
    split = [path.split("/") for path in paths]
    prefixes = sorted({tuple(p[:i]) for p in split for i in range(1, len(p))}, key=len)
    for prefix in prefixes:
        inside = [i for i, p in enumerate(split) if tuple(p[: len(prefix)]) == prefix]
        if any(result[i] is not None for i in inside) or any(len(shapes[i]) < 2 for i in inside):
            continue
        norms = [i for i in inside if any(_NORM.search(part) for part in split[i][-2:])]
        by_norm = bool(norms) and all(len(shapes[i]) == 2 for i in norms) and len(inside) > 1
        by_name = bool(_CONTAINER.match(prefix[-1])) and all(
            len(split[i]) > len(prefix) and not split[i][len(prefix)].isdigit() for i in inside
        )
        # A lone subtree of matrices is not yet a stack of anything.
        if not by_norm and not (by_name and any(len(shapes[i]) > 2 for i in inside)):
            continue
        for axis in (0, 1):
            if len({shapes[i][axis] for i in inside}) == 1:
                for i in inside:
                    result[i] = axis
                break
    return result


def _layout(path: str, shape: tuple[int, ...], stack: int | None) -> Layout:
    parts = path.split("/")
    axes = [axis for axis in range(len(shape)) if axis != stack]
    name = _layer_name(parts)
    if len(axes) < 2 or _is_vector_name(parts):
        return Layout(Kind.VECTOR, None)

    def view(reduction: Sequence[int], output: Sequence[int]) -> View:
        return make_view(shape, [axes[i] for i in reduction], [axes[i] for i in output])

    tail = parts[-2:]
    if len(axes) == 2:
        kind = Kind.MATRIX
        if any(_EMBEDDING.search(part) for part in tail):
            kind = Kind.EMBEDDING
        elif any(_HEAD.match(part) for part in tail) or parts[:-1] in (
            ["output"],
            ["params", "output"],
        ):
            kind = Kind.HEAD
        return Layout(kind, view([0], [1]))
    for einsum, (reduction, output) in _EINSUM.items():
        if einsum in parts and len(axes) == max(reduction + output) + 1:
            return Layout(Kind.MATRIX, view(reduction, output))
    if any(_EXPERTS.search(part) for part in parts[:-1]) and len(axes) == 3:
        return Layout(Kind.MATRIX, view([1], [2]))
    attention_in, attention_out = _ATTENTION_IN.match(name), _ATTENTION_OUT.match(name)
    if attention_in or attention_out:
        fused = "qkv" in name.lower()
        if len(axes) == 4 and not fused:
            axes = axes[1:]  # a stack without siblings that would show it
        if len(axes) == 3 or fused:
            last = len(axes) - 1
            if attention_in:
                return Layout(Kind.MATRIX, view([0], range(1, last + 1)))
            return Layout(Kind.MATRIX, view(range(last), [last]))
    return Layout(Kind.UNKNOWN, None)


def layouts(paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Layout]:
    """The layout of every leaf of a params tree."""
    stacks = stack_axes(paths, shapes)
    return [_layout(*leaf) for leaf in zip(paths, shapes, stacks, strict=True)]
