"""Arrays in boxes: Flax's variables, which carry the names of an array's axes beside it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

# What a leaf of a tree may hold: arrays, shapes, shardings, in a box or not.
Leaf = Any
MaybeBox = Leaf


def is_box(x: MaybeBox) -> bool:
    """Whether ``x`` wraps one array with metadata, as Flax's variables do."""
    # By duck type, so that Flax is no dependency: Linen's boxes unbox, NNX's have metadata.
    linen = hasattr(x, "unbox") and hasattr(x, "replace_boxed")
    nnx = hasattr(x, "get_metadata") and hasattr(x, "set_metadata")
    # A box that optax.masked has emptied holds nothing, as a masked leaf does.
    return (linen or nnx) and len(jax.tree.leaves(x)) == 1


def unbox(x: MaybeBox) -> Leaf:
    """The array in a box, or ``x`` itself."""
    return jax.tree.leaves(x)[0] if is_box(x) else x


def rebox(box: MaybeBox, value: Leaf) -> MaybeBox:
    """``value`` in a box like ``box``, or ``value`` itself where ``box`` is none."""
    if not is_box(box):
        return value
    # An unflattened copy keeps the metadata, whatever the kind of box.
    return jax.tree.unflatten(jax.tree.structure(box), [value])


# Where the boxes of Flax keep the names of an array's axes: Linen's, then NNX's, new and old.
_AXIS_NAMES = ("names", "out_sharding", "optimizer_sharding", "sharding_names", "sharding")


def rebox_part(
    box: MaybeBox,
    value: Leaf,
    axes: Sequence[int | None],
    names: jax.sharding.PartitionSpec | None = None,
) -> MaybeBox:
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

    def part(old: Leaf) -> Leaf:
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
