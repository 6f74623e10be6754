"""Reading the axes of a weight off its path, its shape and its siblings.

Frameworks store a linear layer's weight in a handful of layouts. This module knows them:
plain kernels, Flax ``MultiHeadAttention`` (Linen and NNX), tunix and MaxText einsum
kernels, ``nn.scan`` and NNX stacks, experts. What it does not know it says: a leaf that could
be read in two ways is :attr:`Kind.UNKNOWN`.
"""

import enum
import re
from collections.abc import Sequence
from typing import NamedTuple

from lowrank_optax._plan.view import View, make_view


class Kind(enum.Enum):
    """What a leaf is to a linear layer."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"
    UNKNOWN = "unknown"


class Layout(NamedTuple):
    """A leaf's kind and its view, None for vectors and where the axes have no known meaning."""

    kind: Kind
    view: View | None


# A bias, or any second matrix of a small program.
_BIAS = re.compile(r"^b\d*$")
_VECTOR = re.compile(r"^(bias|scale|gamma|beta|offset|b_\w+|\w+_(bias|scale))$")
_NORM = re.compile(r"(^|_)(rms|layer|group|batch|q|k)?_?(norm|ln)(\d|_|$)|norm$|^ln\w?$", re.I)
# Norms of queries and keys: their scales may have a heads axis that is no stack.
_HEAD_NORM = re.compile(r"(^|_)(q|k|query|key)_?(norm|ln)", re.I)
_EMBEDDING = re.compile(r"embed|(^|_)emb(s|\d*)(_|$)|^w[tp]e$|vocab|^tok(en)?s?$", re.I)
_POSITION = re.compile(r"^(abs_|rel_|relative_)?pos(ition(s|al)?)?(_|$)", re.I)
_HEAD = re.compile(
    r"^(lm_?head\w*|unembed\w*|embed_out|to_logits|logits(_\w+)?|classifier|readout)$", re.I
)
_HEAD_LAYER = re.compile(r"^(head|mlm_head|cls_head|qa_outputs|score)$", re.I)
# Names that other layers have too: a head at the top of the tree, or by the vocabulary's size.
_HEAD_AT_TOP = re.compile(r"^(output(_layer)?|predictions?)$", re.I)
_HEAD_BY_SIZE = re.compile(r"^(out(put)?(_(layer|proj))?|decoder|predictions?|fc_out)$", re.I)
_TOP = re.compile(r"^(params|model|module|transformer|decoder)$", re.I)
_BLOCK = re.compile(r"\d$|attn|attention", re.I)
_CONTAINER = re.compile(r"^(\w*layers|\w*blocks|stack|stacked|scan\w*|repeat(ed)?|h)$", re.I)
_ATTENTION = re.compile(r"attn|attention|(^|_)mha(_|$)", re.I)
_EXPERTS = re.compile(r"expert|moe|mixture", re.I)
_ROUTER = re.compile(r"^(router|gate)$", re.I)
_CONVOLUTION = re.compile(r"conv", re.I)
_ATTENTION_IN = re.compile(
    r"^(w?_?(q|k|v|qkv|kv)(_[ab])?(_proj)?|query|key|value|to_[qkv]+)$", re.I
)
_ATTENTION_OUT = re.compile(r"^(w?o|out|o_proj|out_proj|output|to_out)$", re.I)
# Names of the array itself; the layer's name is the component before.
_ARRAY = re.compile(r"^(kernel|w|weights?|embeddings?)$", re.I)
# Arrays that PyTorch's convention stores as (output, input): Equinox.
_OUTPUT_FIRST = re.compile(r"^weight(_\w+)?$")

# Einsum layers of Gemma and its kin: (reduction axes, output axes) after any stacking axis.
_EINSUM = {
    "q_einsum": ((1,), (0, 2)),  # (heads, d, head_dim)
    "kv_einsum": ((2,), (0, 1, 3)),  # (2, heads, d, head_dim)
    "qkv_einsum": ((2,), (0, 1, 3)),
    "attn_vec_einsum": ((0, 1), (2,)),  # (heads, head_dim, d)
    "gating_einsum": ((1,), (2,)),  # (2, d, f): two matrices, in either order of d and f
}


def _drop(sizes: tuple[int, ...], position: int) -> tuple[int, ...]:
    return sizes[:position] + sizes[position + 1 :]


class _Leaf(NamedTuple):
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]  # the axes that are no stacking axes

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def layer(self) -> tuple[str, ...]:
        """The path of the layer that owns the array."""
        own = len(self.parts) > 1 and _ARRAY.match(self.parts[-1])
        return self.parts[:-1] if own else self.parts

    @property
    def name(self) -> str:
        return self.layer[-1]

    @property
    def parent(self) -> tuple[str, ...]:
        return self.layer[:-1]

    @property
    def is_norm(self) -> bool:
        return self.parts[-1] != "kernel" and any(_NORM.search(part) for part in self.parts[-2:])

    @property
    def is_embedding(self) -> bool:
        """Whether the name is that of an embedding table."""
        return any(_EMBEDDING.search(part) for part in self.parts[-2:])

    @property
    def is_vector(self) -> bool:
        # A class token (1, 1, d) has three axes and is a vector.
        flat = sum(size > 1 for size in self.sizes) < 2
        return flat or self.is_norm or bool(_VECTOR.match(self.parts[-1]))

    def without(self, position: int) -> "_Leaf":
        """The leaf without one of its axes, which then is a batch axis."""
        return self._replace(axes=_drop(self.axes, position))

    def view(self, reduction: Sequence[int], output: Sequence[int]) -> View:
        """A view from positions among the axes that are no stacking axes."""
        return make_view(
            self.shape, [self.axes[i] for i in reduction], [self.axes[i] for i in output]
        )

    def matrix(self, first: int = 0) -> View:
        """The view of a plain matrix that starts at an axis; axes before it are batch axes."""
        rows, columns = first, first + 1
        if _OUTPUT_FIRST.match(self.parts[-1]):
            rows, columns = columns, rows
        return self.view([rows], [columns])


def _stack_axis(prefix: tuple[str, ...], inside: Sequence[_Leaf]) -> int | None:
    """The position of the axis that stacks a whole subtree, or None."""
    # Vectors, and tables of vectors, have too few axes to be stacked.
    if any(len(leaf.axes) < 2 or (len(leaf.axes) == 2 and leaf.is_embedding) for leaf in inside):
        return None
    norms = [
        leaf
        for leaf in inside
        if leaf.is_norm and not any(_HEAD_NORM.search(part) for part in leaf.parts[-2:])
    ]
    candidates: tuple[int, ...] = ()
    if norms and len(inside) > len(norms):
        # Norm scales are vectors, so the other axis of theirs is a stack: 0, or 1 in MaxText.
        candidates = (0, 1)
    elif (
        prefix
        and _CONTAINER.match(prefix[-1])
        and all(len(leaf.axes) == len(leaf.shape) for leaf in inside)
        and all(
            len(leaf.parts) > len(prefix) and not leaf.parts[len(prefix)].isdigit()
            for leaf in inside
        )
        # A container of matrices alone is not yet a stack of anything.
        and any(len(leaf.axes) > 2 for leaf in inside)
    ):
        candidates = (0,)
    return next((a for a in candidates if len({leaf.sizes[a] for leaf in inside}) == 1), None)


def _without_stacks(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Takes away the axes that ``nn.scan``, an NNX stack or a pipeline added.

    A subtree is stacked if all its leaves have the same size at one axis and either it holds
    norm scales of two axes, or its name is that of a container and no layer number follows.
    """
    leaves = list(leaves)
    subtrees: dict[tuple[str, ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        for depth in range(len(leaf.parts)):
            subtrees.setdefault(leaf.parts[:depth], []).append(number)
    for _ in range(2):  # a pipeline's stages hold stacks themselves
        taken: set[int] = set()
        for prefix in sorted(subtrees, key=len):
            inside = subtrees[prefix]
            axis = None
            if not taken.intersection(inside):
                axis = _stack_axis(prefix, [leaves[i] for i in inside])
            if axis is not None:
                taken.update(inside)
                for i in inside:
                    leaves[i] = leaves[i].without(axis)
    return leaves


def _heads_or_stack(into: tuple[int, ...], out: tuple[int, ...]) -> str | None:
    """How a pair of attention kernels stores its heads, as far as their shapes tell.

    Returns:
        ``"heads"`` for (d, heads, head_dim) and (heads, head_dim, d), either of them
        flattened or not; ``"stack"`` for (L, d, heads * head_dim) and
        (L, heads * head_dim, d); None if it may be both or neither.
    """
    if len(into) == len(out) == 3:
        heads = into[2] == out[1]
        stack = into[0] == out[0] and into[1] == out[2]
        # The last axes of square matrices agree too, but d is hardly the number of heads.
        if stack:
            return None if heads and into[0] == out[2] else "stack"
    elif len(into) > len(out) == 2:
        heads = into[0] == out[1] and out[0] % into[-1] == 0
    elif len(into) == 2 and len(out) == 3:
        heads = into[0] == out[2] and into[1] % out[1] == 0
    else:  # fused: (d, 3, heads, head_dim)
        heads = len(into) > len(out) == 3 and into[0] == out[2] and into[-1] == out[1]
    return "heads" if heads else None


def _unstacked_heads(pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> int | None:
    """Where a pair of kernels of four axes, else a pair of heads, has its stacking axis."""

    def fits(axis: int) -> bool:
        return all(
            len(into) == len(out) == 4
            and into[axis] == out[axis]
            and _heads_or_stack(_drop(into, axis), _drop(out, axis)) == "heads"
            for into, out in pairs
        )

    axes = [axis for axis in (0, 1) if fits(axis)]
    return axes[0] if pairs and len(axes) == 1 else None


def _attention_view(leaf: _Leaf, siblings: Sequence[_Leaf]) -> View | None:
    """The view of an attention kernel of three or more axes, judged by its counterparts."""
    is_in = bool(_ATTENTION_IN.match(leaf.name))
    counterpart = _ATTENTION_OUT if is_in else _ATTENTION_IN
    others = [s.sizes for s in siblings if counterpart.match(s.name) and not s.is_vector]
    pairs = [(leaf.sizes, other) if is_in else (other, leaf.sizes) for other in others]
    verdicts = {_heads_or_stack(*pair) for pair in pairs} - {None}
    if not verdicts and (axis := _unstacked_heads(pairs)) is not None:
        leaf, verdicts = leaf.without(axis), {"heads"}
    if not pairs and is_in and len(leaf.axes) == 3 and "kv" not in leaf.name.lower():
        # Alone, (d, heads, head_dim) is told from (L, d, heads * head_dim) by a long first axis.
        verdicts = {"heads"} if leaf.sizes[0] > leaf.sizes[1] else set()
    last = len(leaf.axes) - 1
    if verdicts == {"stack"}:
        return leaf.matrix(first=1)
    if verdicts == {"heads"} and is_in:
        return leaf.view([0], range(1, last + 1))
    if verdicts == {"heads"} and last == 2:
        return leaf.view([0, 1], [2])
    return None


def _are_experts(leaf: _Leaf, siblings: Sequence[_Leaf]) -> bool:
    """Whether the axes before the matrix of ``leaf`` index experts, and layers perhaps."""
    # There are fewer experts than features; (d, E, f) and (E, d, 2, f) look otherwise.
    if min(leaf.sizes[-2:]) < max(leaf.sizes[:-2]):
        return False
    for part in reversed(leaf.layer):
        if _ATTENTION.search(part):
            return False
        if _EXPERTS.search(part):
            return True
    return any(
        _ROUTER.match(sibling.name) and sibling.sizes[1:] == leaf.sizes[:-2] for sibling in siblings
    )


def _kind(leaf: _Leaf, siblings: Sequence[_Leaf], vocabularies: set[int]) -> Kind:
    """The kind of a leaf that is neither vector nor unknown, by its name."""
    if any(_HEAD.match(part) for part in leaf.parts) or _HEAD_LAYER.match(leaf.name):
        return Kind.HEAD
    if leaf.is_embedding:
        return Kind.EMBEDDING
    if _POSITION.match(leaf.name) and leaf.parts[-1] not in ("kernel", "w"):
        return Kind.EMBEDDING
    in_block = len(leaf.axes) < len(leaf.shape) or any(_BLOCK.search(p) for p in leaf.parent)
    in_attention = any(_ATTENTION_IN.match(sibling.name) for sibling in siblings)
    if len(leaf.axes) == 2 and not in_block and not in_attention:
        at_top = all(_TOP.match(part) for part in leaf.parent)
        if at_top and _HEAD_AT_TOP.match(leaf.name):
            return Kind.HEAD
        if _HEAD_BY_SIZE.match(leaf.name) and vocabularies.intersection(leaf.sizes):
            return Kind.HEAD
    return Kind.MATRIX


def _head_view(leaf: _Leaf, vocabularies: set[int]) -> View:
    """The vocabulary is the output, also where a head has an embedding's layout."""
    known = [axis for axis, size in enumerate(leaf.sizes) if size in vocabularies]
    transposed = _OUTPUT_FIRST.match(leaf.parts[-1]) or leaf.parts[-1] == "embedding"
    output = known[0] if len(known) == 1 else 0 if transposed else 1
    return leaf.view([1 - output], [output])


def _layout(
    leaf: _Leaf, siblings: Sequence[_Leaf], arrays: Sequence[_Leaf], vocabularies: set[int]
) -> Layout:
    is_bias = _BIAS.match(leaf.parts[-1]) and any(len(a.axes) > len(leaf.axes) for a in arrays)
    if leaf.is_vector or is_bias:
        return Layout(Kind.VECTOR, None)
    kind = _kind(leaf, siblings, vocabularies)
    if kind is not Kind.MATRIX and len(leaf.axes) > 2:
        return Layout(kind, None)
    if kind is Kind.EMBEDDING:
        return Layout(kind, leaf.view([0], [1]))
    if kind is Kind.HEAD:
        return Layout(kind, _head_view(leaf, vocabularies))
    if len(leaf.shape) > 2 and _CONVOLUTION.search(leaf.name):
        return Layout(Kind.UNKNOWN, None)
    if len(leaf.axes) == 2:
        return Layout(kind, leaf.matrix())
    for einsum, (reduction, output) in _EINSUM.items():
        if einsum in leaf.parts and len(leaf.axes) == max(reduction + output) + 1:
            return Layout(kind, leaf.view(reduction, output))
    view = None
    if _ATTENTION_IN.match(leaf.name) or _ATTENTION_OUT.match(leaf.name):
        view = _attention_view(leaf, siblings)
    if view is None and _are_experts(leaf, siblings):
        view = leaf.matrix(first=len(leaf.axes) - 2)
    return Layout(Kind.UNKNOWN if view is None else kind, view)


def layouts(paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Layout]:
    """The layout of every leaf of a params tree."""
    leaves = [
        _Leaf(tuple(path.split("/")), tuple(shape), tuple(range(len(shape))))
        for path, shape in zip(paths, shapes, strict=True)
    ]
    leaves = _without_stacks(leaves)
    siblings: dict[tuple[str, ...], list[_Leaf]] = {}  # arrays of layers beside a layer
    arrays: dict[tuple[str, ...], list[_Leaf]] = {}  # arrays beside an array
    for leaf in leaves:
        siblings.setdefault(leaf.parent, []).append(leaf)
        arrays.setdefault(leaf.parts[:-1], []).append(leaf)
    vocabularies = {
        leaf.sizes[0]
        for leaf in leaves
        if len(leaf.axes) == 2
        and not _POSITION.match(leaf.name)
        and _kind(leaf, [], set()) is Kind.EMBEDDING
    }
    return [
        _layout(leaf, siblings[leaf.parent], arrays[leaf.parts[:-1]], vocabularies)
        for leaf in leaves
    ]
