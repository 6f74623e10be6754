"""All tree plumbing: leaves in, leaves out, and names for them.

The rest of the library works on flat lists of leaves, in the order of the params tree. A
*leaf* here is what a person would call one: an array, a boxed array (a Flax ``Variable``
or ``Partitioned``), a compact gradient, or None.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compact:
    """A compact gradient: what the backward pass left of one target's gradient.

    It stands in a tree of gradients where the leaf-shaped array would, and is a pytree node, so
    norms, clipping and sums over micro-batches act on its arrays.

    Attributes:
        core: the gradient in the subspace, ``PᵀG``, ``GQ`` or ``PᵀGQ``.
        extra: the products with extra directions that were asked for, or None.
    """

    # JAX puts placeholders in the place of arrays.
    core: Any
    extra: Any = None


def is_box(x: Any) -> bool:
    """Whether ``x`` wraps one array with metadata, as Flax's variables do."""
    # By duck type, so that Flax is no dependency: Linen's boxes unbox, NNX's have metadata.
    linen = hasattr(x, "unbox") and hasattr(x, "replace_boxed")
    nnx = hasattr(x, "get_metadata") and hasattr(x, "set_metadata")
    # A box that optax.masked has emptied holds nothing, as a masked leaf does.
    return (linen or nnx) and len(jax.tree.leaves(x)) == 1


def unbox(x: Any) -> Any:
    """The array in a box, or ``x`` itself."""
    return jax.tree.leaves(x)[0] if is_box(x) else x


def rebox(box: Any, value: Any) -> Any:
    """``value`` in a box like ``box``, or ``value`` itself where ``box`` is none."""
    if not is_box(box):
        return value
    # An unflattened copy keeps the metadata, whatever the kind of box.
    return jax.tree.unflatten(jax.tree.structure(box), [value])


# Where the boxes of Flax keep the names of an array's axes: Linen's, then NNX's, new and old.
_AXIS_NAMES = ("names", "out_sharding", "optimizer_sharding", "sharding_names", "sharding")


def rebox_part(box: Any, value: Any, axes: Sequence[int | None], names: Any = None) -> Any:
    """``value``, an array made from the one in ``box``, in a box whose axis names are its own.

    Flax takes the names, which say how an array is sharded, for those of the array in the box:
    a copy of the parameter's would shard the rank axis of a basis, or fit no axis at all.

    Args:
        box: a box, or an array that is in none.
        value: the array.
        axes: for each of its axes the axis of the boxed array that it is, or None.
        names: the names where they are known otherwise.

    Returns:
        A box of the kind of ``box``, or ``value`` itself where ``box`` is none.
    """
    if not is_box(box):
        return value

    def part(old: Any) -> Any:
        if isinstance(old, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(old.mesh, jax.sharding.PartitionSpec(*part(old.spec)))
        if names is not None:
            return tuple(names)
        padded = (*old, *[None] * len(axes))
        return tuple(None if axis is None else padded[axis] for axis in axes)

    if dataclasses.is_dataclass(box):  # Linen's; a box of another kind has no axis names
        if not hasattr(box, "names"):
            return value
        changes: dict[str, Any] = {"value": value, "names": part(box.names)}  # type: ignore
        return dataclasses.replace(box, **changes)  # type: ignore
    made = rebox(box, value)
    if hasattr(made, "get_metadata"):
        metadata = made.get_metadata()
        own = {name: part(metadata[name]) for name in _AXIS_NAMES if metadata.get(name)}
        if own:
            made.set_metadata(**own)
    return made


def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, Compact) or is_box(x)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Leaves, with None and boxed arrays each counting as one, and the tree's structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def flatten_with_paths(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Like :func:`flatten`, with the name of each leaf in front."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [path_name(path) for path, _ in pairs], [leaf for _, leaf in pairs], treedef


def path_name(path: Sequence[Any]) -> str:
    """The name of a leaf as a person writes it: ``decoder/layers_0/q/kernel``."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key).strip("./[]'\""))
    return "/".join(parts)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> PyTree:
    return jax.tree.unflatten(treedef, leaves)


def sparse_tree(treedef: Any, leaves: Sequence[Any]) -> PyTree:
    """A tree parallel to params that holds ``optax.MaskedNode()`` where a leaf is None."""
    return unflatten(treedef, [optax.MaskedNode() if leaf is None else leaf for leaf in leaves])


def by_path(tree: PyTree) -> dict[str, Any]:
    """The arrays of a sparse tree by their names; masked positions have no entry."""
    paths, leaves, _ = flatten_with_paths(tree)
    return {path: unbox(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def with_leaves(tree: PyTree, replacements: Mapping[str, Any]) -> PyTree:
    """``tree`` with some leaves replaced by name, its containers left as they are."""
    paths, leaves, treedef = flatten_with_paths(tree)
    return unflatten(
        treedef,
        [
            rebox(leaf, replacements[path]) if path in replacements else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ],
    )


def _signature(tree: PyTree) -> Hashable:
    """What two calls must share to share one computation: structure, shapes, shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    typeof = getattr(jax, "typeof", None)
    return treedef, tuple(
        (x.shape, x.dtype, str(typeof(x)) if typeof else "") for x in map(jnp.asarray, leaves)
    )


def map_sharing(
    fn: Callable[..., PyTree], calls: Sequence[tuple[Hashable, tuple[Any, ...]]]
) -> list[PyTree]:
    """Calls ``fn(*arguments)`` for each entry, compiling it once for all that look alike.

    Calls whose static key and argument shapes agree run one after the other in a loop over
    one copy of the computation, so that compile time does not grow with the number of
    layers. Each turn of the loop picks its own arguments, which are never stacked: that
    would double the memory of the gradients.

    Args:
        fn: a function of a static key and arrays.
        calls: pairs of a hashable static key, and a tuple of pytrees of arrays.

    Returns:
        The results, in the order of ``calls``.
    """
    groups: dict[tuple[Hashable, Hashable], list[int]] = {}
    for index, (static, arguments) in enumerate(calls):
        groups.setdefault((static, _signature(arguments)), []).append(index)
    results: list[PyTree] = [None] * len(calls)
    for (static, _), members in groups.items():
        if len(members) == 1:
            results[members[0]] = fn(static, *calls[members[0]][1])
            continue

        def one(turn, static=static, members=members):
            picks = [lambda index=index: calls[index][1] for index in members]
            return fn(static, *jax.lax.switch(turn, picks))

        stacked = jax.lax.map(one, jnp.arange(len(members)))
        for turn, index in enumerate(members):
            results[index] = jax.tree.map(lambda x, turn=turn: x[turn], stacked)
    return results
