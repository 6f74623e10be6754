"""Where the decoder's parameters and its batches lie on a mesh of devices.

The mesh may have the axes ``data`` (batches are divided), ``fsdp`` (batches and parameters are) and
``tp`` (heads, hidden units and vocabulary are). The compiler moves what has to be moved.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lowrank_optax as lro
from running.errors import UserError

AXES = ("data", "fsdp", "tp")

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
    wanted, found = math.prod(sizes.values()), jax.device_count()
    if wanted != found:
        hint = ""
        if jax.default_backend() == "cpu":
            hint = f" (on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={wanted})"
        raise UserError(
            f"--mesh wants {wanted} devices and there are {found}: change its sizes{hint}"
        )
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _axes(path: tuple[str, ...], ndim: int) -> tuple[str | None, ...]:
    """The mesh axis of each axis of a parameter."""
    module, kind = path[-2:]
    if kind == "embedding":
        return ("tp", "fsdp")
    if kind == "scale":
        return (None,) * ndim
    inputs, outputs = ("fsdp", "tp") if module in _COLUMNS else ("tp", "fsdp")
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


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and where the arrays of a training run lie on it.

    Attributes:
        mesh: of all devices, in all processes.
    """

    mesh: Mesh

    @classmethod
    def make(cls, sizes: dict[str, int], batch_size: int) -> "Placement":
        """The mesh with these axes.

        Args:
            sizes: the number of devices along each axis.
            batch_size: of one micro-batch, which the batch axes must divide.

        Raises:
            UserError: if there are not as many devices, or the batch does not divide.
        """
        mesh = make_mesh(sizes)
        if batch_size % row_parts(mesh):
            raise UserError(
                f"--mesh splits a micro-batch of {batch_size} over {row_parts(mesh)} devices: "
                "change --batch-size, --accumulate or the mesh"
            )
        return cls(mesh)

    def state(self, tx: optax.GradientTransformation, shapes: Any) -> tuple[Any, Any]:
        """Shardings of the parameters and of the optimizer's state."""
        params = param_shardings(self.mesh, shapes)
        return params, lro.state_shardings(tx, shapes, params)

    def tokens(self, batch: np.ndarray) -> jax.Array:
        """A batch on its devices. Every process has all of it, and keeps what its devices need."""
        sharding = batch_sharding(self.mesh)
        if batch.shape[0] % row_parts(self.mesh):
            sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
