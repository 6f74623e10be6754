"""Reading the axes of a weight off its path, its shape and its siblings.

Frameworks store a linear layer's weight in a handful of layouts. This module knows them:
plain kernels, Flax ``MultiHeadAttention`` (Linen and NNX), tunix and MaxText einsum
kernels, ``nn.scan`` and NNX stacks, experts. What it does not know it says: a leaf that could
be read in two ways is :attr:`Kind.UNKNOWN`.
"""

import collections
import enum
from collections.abc import Sequence
from typing import NamedTuple

from lowrank_optax._plan import names
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
        return names.layer_of(self.parts)

    @property
    def name(self) -> str:
        return self.layer[-1]

    @property
    def parent(self) -> tuple[str, ...]:
        return self.layer[:-1]

    @property
    def is_norm(self) -> bool:
        return names.is_norm(self.parts)

    @property
    def is_embedding(self) -> bool:
        """Whether the name is that of an embedding table."""
        return names.is_embedding(self.parts)

    @property
    def in_block(self) -> bool:
        """Whether the layer is part of a block, one of many or stacked."""
        stacked = len(self.axes) < len(self.shape)
        return stacked or any(names.BLOCK.search(part) for part in self.parent)

    @property
    def is_vector(self) -> bool:
        # A class token (1, 1, d) has three axes and is a vector.
        flat = sum(size > 1 for size in self.sizes) < 2
        return flat or self.is_norm or bool(names.VECTOR.match(self.parts[-1]))

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
        if names.OUTPUT_FIRST.match(self.parts[-1]):
            rows, columns = columns, rows
        return self.view([rows], [columns])


def _stack_axis(prefix: tuple[str, ...], inside: Sequence[_Leaf]) -> int | None:
    """The position of the axis that stacks a whole subtree, or None."""
    # Vectors, and tables of vectors, have too few axes to be stacked.
    if any(
        len(leaf.axes) < 2 or (len(leaf.axes) == 2 and leaf.is_embedding and not leaf.is_vector)
        for leaf in inside
    ):
        return None
    norms = [
        leaf
        for leaf in inside
        if leaf.is_norm and not any(names.HEAD_NORM.search(part) for part in leaf.parts[-2:])
    ]
    candidates: tuple[int, ...] = ()
    if norms and len(inside) > len(norms):
        # Norm scales are vectors, so the other axis of theirs is a stack: 0, or 1 in MaxText.
        candidates = (0, 1)
    elif (
        prefix
        and names.CONTAINER.match(prefix[-1])
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
    is_in = bool(names.ATTENTION_IN.match(leaf.name))
    counterpart = names.ATTENTION_OUT if is_in else names.ATTENTION_IN
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
        if names.ATTENTION.search(part):
            return False
        if names.EXPERTS.search(part):
            return True
    return any(
        names.ROUTER.match(sibling.name) and sibling.sizes[1:] == leaf.sizes[:-2]
        for sibling in siblings
    )


def _kind(leaf: _Leaf, siblings: Sequence[_Leaf], vocabularies: set[int]) -> Kind:
    """The kind of a leaf that is neither vector nor unknown, by its name."""
    in_attention = any(names.ATTENTION_IN.match(sibling.name) for sibling in siblings)
    is_score = bool(names.SCORE.match(leaf.name))
    if names.is_head(leaf.parts) and not (is_score and in_attention):
        return Kind.HEAD
    if leaf.is_embedding:
        return Kind.EMBEDDING
    if len(leaf.axes) == 2 and not leaf.in_block and not in_attention:
        if names.is_output_at_top(leaf.parts):
            return Kind.HEAD
        if names.HEAD_BY_SIZE.match(leaf.name) and leaf.matrix().columns in vocabularies:
            return Kind.HEAD
    return Kind.MATRIX


def _head_view(leaf: _Leaf, vocabularies: set[int]) -> View:
    """The vocabulary is the output, also where a head has an embedding's layout."""
    known = [axis for axis, size in enumerate(leaf.sizes) if size in vocabularies]
    transposed = names.OUTPUT_FIRST.match(leaf.parts[-1]) or leaf.parts[-1] == "embedding"
    output = known[0] if len(known) == 1 else 0 if transposed else 1
    return leaf.view([1 - output], [output])


def _layout(
    leaf: _Leaf, siblings: Sequence[_Leaf], arrays: Sequence[_Leaf], vocabularies: set[int]
) -> Layout:
    is_bias = names.BIAS.match(leaf.parts[-1]) and any(len(a.axes) > len(leaf.axes) for a in arrays)
    if leaf.is_vector or is_bias:
        return Layout(Kind.VECTOR, None)
    kind = _kind(leaf, siblings, vocabularies)
    if kind is not Kind.MATRIX and len(leaf.axes) > 2:
        return Layout(kind, None)
    if kind is Kind.EMBEDDING:
        return Layout(kind, leaf.view([0], [1]))
    if kind is Kind.HEAD:
        return Layout(kind, _head_view(leaf, vocabularies))
    if len(leaf.shape) > 2 and names.CONVOLUTION.search(leaf.name):
        return Layout(Kind.UNKNOWN, None)
    if len(leaf.axes) == 2:
        return Layout(kind, leaf.matrix())
    for einsum, (reduction, output) in names.EINSUM.items():
        if einsum in leaf.parts and len(leaf.axes) == max(reduction + output) + 1:
            return Layout(kind, leaf.view(reduction, output))
    view = None
    if names.ATTENTION_IN.match(leaf.name) or names.ATTENTION_OUT.match(leaf.name):
        view = _attention_view(leaf, siblings)
    if view is None and _are_experts(leaf, siblings):
        view = leaf.matrix(first=len(leaf.axes) - 2)
    return Layout(Kind.UNKNOWN if view is None else kind, view)


def _unnamed_head(
    leaves: Sequence[_Leaf], found: Sequence[Layout], vocabularies: set[int]
) -> int | None:
    """The number of the leaf that its place and its size alone make the head, or None.

    In a list of layers, or where Flax makes up the names, the head is called ``layers/7`` or
    ``Dense_3``. It is taken for one if

    - no other leaf is a head,
    - it is a plain matrix outside of blocks, the last of the layers counted with it,
    - it has as many outputs as an embedding has entries, and
    - no other matrix has an axis of that length, and no embedding that width. Otherwise it may
      be a hidden layer that happens to be as wide, as in models of bytes.
    """
    if any(layout.kind is Kind.HEAD for layout in found):
        return None
    leaf_layouts = list(zip(leaves, found, strict=True))
    lengths: collections.Counter[int] = collections.Counter()
    for leaf, layout in leaf_layouts:
        if layout.kind in (Kind.MATRIX, Kind.UNKNOWN):
            lengths.update(leaf.shape)
        elif layout.kind is Kind.EMBEDDING:
            lengths.update(leaf.shape[-1:])
    heads = [
        number
        for number, (leaf, layout) in enumerate(leaf_layouts)
        if layout.kind is Kind.MATRIX
        and len(leaf.axes) == 2
        and (outputs := leaf.matrix().columns) in vocabularies
        and lengths[outputs] == 1
        and not leaf.in_block
        and names.is_unnamed_last(leaf.layer, [other.layer for other in leaves])
    ]
    return heads[0] if len(heads) == 1 else None


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
        and not names.NO_VOCABULARY.search(leaf.name)
        and _kind(leaf, [], set()) is Kind.EMBEDDING
    }
    found = [
        _layout(leaf, siblings[leaf.parent], arrays[leaf.parts[:-1]], vocabularies)
        for leaf in leaves
    ]
    head = _unnamed_head(leaves, found, vocabularies)
    if head is not None:
        found[head] = Layout(Kind.HEAD, _head_view(leaves[head], vocabularies))
    return found
