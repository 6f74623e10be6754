"""Where the decoder's parameters and its batches lie on a mesh of devices.

The mesh may have the axes ``data`` (batches are divided), ``fsdp`` (batches and parameters are) and
``tensor`` (heads and hidden units are). The compiler moves what has to be moved.
"""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from errors import UserError

AXES = ("data", "fsdp", "tensor")

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """The mesh that ``--mesh`` asks for, over all devices.

    Args:
        sizes: by axis.

    Returns:
        A mesh of Auto axes.

    Raises:
        UserError: if the sizes are not those of the machine.
    """
    devices = jax.device_count()
    if math.prod(sizes.values()) != devices:
        asked = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"--mesh {asked} is of {math.prod(sizes.values())} devices, and JAX sees {devices}: "
            "the sizes must multiply to that"
        )
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _axes(path: tuple[str, ...], ndim: int) -> tuple[str | None, ...]:
    """The mesh axis of each axis of a parameter."""
    module, kind = path[-2:]
    if kind == "embedding":
        return ("tensor", "fsdp")
    if kind == "scale":
        return (None,) * ndim
    inputs, outputs = ("fsdp", "tensor") if module in _COLUMNS else ("tensor", "fsdp")
    own = {
        "kernel": (inputs, outputs),
        "lora_a": (inputs, None),
        "lora_b": (None, outputs),
        "bias": (outputs,),
    }[kind]
    return (None,) * (ndim - len(own)) + own


def param_shardings(mesh: Mesh, shapes: Any) -> Any:
    """Where parameters lie. What a mesh axis does not divide is whole on its devices.

    Args:
        mesh: from `make_mesh`.
        shapes: the decoder's parameters or their shapes.

    Returns:
        A tree like ``shapes``.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = _axes(tuple(entry.key for entry in path), len(leaf.shape))
        fitting = [
            name if name in mesh.shape and size % mesh.shape[name] == 0 else None
            for name, size in zip(names, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fitting))

    return jax.tree_util.tree_map_with_path(sharding, shapes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where a batch lies: its rows are divided over ``data`` and ``fsdp``."""
    return NamedSharding(mesh, PartitionSpec(_row_axes(mesh)))


def row_parts(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are divided."""
    return math.prod(mesh.shape[name] for name in _row_axes(mesh))


def _row_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("data", "fsdp") if name in mesh.shape)
