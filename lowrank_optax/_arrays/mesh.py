"""Where arrays lie on a mesh, in names: pure functions of partition specs.

A *placement* is one tuple of mesh axis names for each axis of an array, empty where it is
whole on every device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

try:
    from jax.experimental.shard_alike import shard_alike
except ImportError:  # JAX 0.12 has dropped it, and has nothing in its place.
    shard_alike = None

Array = jax.Array
Names = tuple[str, ...]


def axis_names(spec: Any, ndim: int) -> list[Names]:
    """The placement that a partition spec says, one entry for each of ``ndim`` axes."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    names = []
    for entry in entries:
        # Besides names there are None and PartitionSpec.UNCONSTRAINED.
        parts = entry if isinstance(entry, tuple) else (entry,)
        names.append(tuple(part for part in parts if isinstance(part, str)))
    return names


def spec_of(placement: Sequence[Names]) -> PartitionSpec:
    """The partition spec of a placement."""
    return PartitionSpec(
        *(None if not names else names[0] if len(names) == 1 else names for names in placement)
    )


def fit(placement: Sequence[Names], shape: Sequence[int], mesh: Mapping[str, int]) -> list[Names]:
    """A placement without the mesh axes that do not divide the axis they are on.

    Args:
        placement: of an array.
        shape: the array's shape.
        mesh: the size of each mesh axis.

    Returns:
        The placement; of an axis the first names that divide it stay.
    """
    fitted = []
    for names, size in zip(placement, shape, strict=True):
        kept: Names = ()
        for name in names:
            if size % math.prod(mesh[n] for n in (*kept, name)):
                break
            kept += (name,)
        fitted.append(kept)
    return fitted


def spread(
    placement: Sequence[Names],
    axes: Sequence[int | None],
    shape: Sequence[int],
    of_parameter: Sequence[Names],
    mesh: Mapping[str, int],
) -> list[Names]:
    """A placement that also uses the mesh axes which a parameter is on and the array is not.

    The core of a matrix whose rows are sharded has none of these rows, and would be whole on
    every device. So that a device holds no more than its share of the optimizer's state, the
    mesh axes that are left over divide the largest axis which they can.

    Args:
        placement: of the array.
        axes: for each of its axes the parameter's axis that it is, None for rank axes, which
            stay whole.
        shape: the array's shape.
        of_parameter: the parameter's placement.
        mesh: the size of each mesh axis.

    Returns:
        The placement.
    """
    result = list(placement)
    used = {name for names in placement for name in names}
    candidates = [i for i, axis in enumerate(axes) if axis is not None]
    candidates.sort(key=lambda i: -shape[i])
    for name in (name for names in of_parameter for name in names if name not in used):
        for i in candidates:
            if shape[i] % math.prod(mesh[n] for n in (*result[i], name)) == 0:
                result[i] += (name,)
                break
    return result


def _explicit_sharding(x: object) -> NamedSharding | None:
    """The sharding of ``x`` if its mesh has Explicit axes, else None."""
    sharding = getattr(x, "sharding", None) if not isinstance(x, Tracer) else None
    if not isinstance(sharding, NamedSharding):
        # The type of a tracer has a sharding too, of an abstract mesh.
        typeof = getattr(jax, "typeof", None)
        sharding = getattr(typeof(x), "sharding", None) if typeof else None
    mesh = getattr(sharding, "mesh", None)
    if sharding is None or mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def explicit_names(x: Any) -> list[Names] | None:
    """The Explicit mesh axes that each axis of ``x`` is on; None where its mesh has none."""
    sharding = _explicit_sharding(x)
    if sharding is None:
        return None
    # Of a mesh with axes of both kinds only these are part of the type.
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return [
        tuple(name for name in names if kinds[name] == AxisType.Explicit)
        for names in axis_names(sharding.spec, x.ndim)
    ]


def explicit_mesh(*operands: object) -> Any:
    for x in operands:
        sharding = _explicit_sharding(x)
        if sharding is not None:
            return sharding.mesh
    return None


def place(x: Array, axes: Sequence[int | None], like: Any, spreading: bool = False) -> Array:
    """``x`` on the mesh axes of ``like``.

    Only Explicit axes are placed: there the sharding is part of an array's type, which loops,
    branches and optimizer states must keep.

    Args:
        x: an array.
        axes: for each of its axes the axis of ``like`` that it is, None for one that ``like``
            does not have, which is replicated.
        like: an array, or its shape with a sharding.
        spreading: also use the mesh axes of ``like`` that none of ``axes`` is on: see
            :func:`spread`.

    Returns:
        The array with that placement.
    """
    where = explicit_names(like)
    if where is None:
        return x
    mesh = explicit_mesh(like)
    names = [where[axis] if axis is not None else () for axis in axes]
    if spreading:
        names = spread(names, axes, x.shape, where, mesh.shape)
    return jax.sharding.reshard(x, NamedSharding(mesh, spec_of(names)))


def place_like(x: Array, like: Any) -> Array:
    """``x`` with the sharding of an array of the same shape, on Explicit axes."""
    return place(x, range(x.ndim), like)


def shard_like(x: Array, like: Any) -> Array:
    """``x`` where ``like`` lies, an array of the same shape, on axes of any kind.

    Of Auto axes only the compiler knows where an array lies, so it is asked to put both alike. From
    JAX 0.12 on there is no way to ask, and it decides alone.

    Args:
        x: an array.
        like: another, or None for no wish.

    Returns:
        The array.
    """
    if like is None or x.shape != like.shape:
        return x
    x = place_like(x, like)
    if shard_alike is None:
        return x
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    # Outside jit an array has its place already, and inside shard_map there is none to choose.
    if not isinstance(x, Tracer) or AxisType.Manual in kinds or kinds == {AxisType.Explicit}:
        return x
    return shard_alike(x, like)[0]


def type_sharding(x: object) -> NamedSharding | None:
    """The sharding in the type of ``x``, for a shape that stands for it."""
    return _explicit_sharding(x)


def explicit_spec(x: object) -> PartitionSpec | None:
    """The partition spec in the type of ``x``; None where its mesh has no Explicit axes."""
    names = explicit_names(x)
    return None if names is None else spec_of(names)
