"""Where arrays lie on a mesh, in names: pure functions of partition specs.

A *placement* is one tuple of mesh axis names for each axis of an array, empty where it is
whole on every device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

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
