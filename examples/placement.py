"""Where things lie: the mesh of ``--mesh``, and which array goes where on it.

Mesh axes: ``data`` (copies of the model), ``fsdp`` (copies that share its weights), ``tp`` (heads,
hidden units and vocabulary divided). The batch is split over the first two.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from errors import UserError

AXES = ("data", "fsdp", "tp")
BATCH = ("data", "fsdp")

Shardings: TypeAlias = Any
"""A tree of shardings."""

# The name of a layer -> its (input, output) axes; its kernel may have a leading axis of layers.
_KERNELS = {
    "q_proj": ("fsdp", "tp"),
    "k_proj": ("fsdp", "tp"),
    "v_proj": ("fsdp", "tp"),
    "o_proj": ("tp", "fsdp"),
    "gate_proj": ("fsdp", "tp"),
    "up_proj": ("fsdp", "tp"),
    "down_proj": ("tp", "fsdp"),
    "lm_head": ("fsdp", "tp"),
    "embed_tokens": ("tp", "fsdp"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and the shardings of a decoder on it.

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
        wanted, found = math.prod(sizes.values()), jax.device_count()
        if wanted != found:
            hint = ""
            if jax.default_backend() == "cpu":
                hint = f" (on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={wanted})"
            raise UserError(
                f"--mesh wants {wanted} devices and there are {found}: change its sizes{hint}"
            )
        split = math.prod(sizes.get(name, 1) for name in BATCH)
        if batch_size % split:
            raise UserError(
                f"--mesh splits a micro-batch of {batch_size} over {split} devices: change "
                "--batch-size, --accumulate or the mesh"
            )
        kinds = (AxisType.Auto,) * len(sizes)
        return cls(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds))

    def _named(self, shape: tuple[int, ...], axes: tuple[Any, ...]) -> NamedSharding:
        """A sharding by the mesh axes that there are and that divide."""
        sizes = dict(self.mesh.shape)
        entries = [
            name if name in sizes and size % sizes[name] == 0 else None
            for size, name in zip(shape, axes, strict=True)
        ]
        return NamedSharding(self.mesh, P(*entries))

    def params(self, shapes: Any) -> Shardings:
        """Shardings of the parameters of `decoder.Decoder`, from their shapes."""

        def place(path: Any, leaf: Any) -> NamedSharding:
            names = [getattr(key, "key", None) for key in path]
            layer = next((name for name in names if name in _KERNELS), None)
            if layer is None:
                return NamedSharding(self.mesh, P())
            axes = _KERNELS[layer][1:] if names[-1] == "bias" else _KERNELS[layer]
            stacked = (None,) * (leaf.ndim - len(axes))
            return self._named(leaf.shape, (*stacked, *axes))

        return jax.tree_util.tree_map_with_path(place, shapes)

    def state(self, tx: optax.GradientTransformation, shapes: Any) -> tuple[Shardings, Shardings]:
        """Shardings of the parameters and of the optimizer's state."""
        params = self.params(shapes)
        return params, lro.state_shardings(tx, shapes, params)

    def tokens(self, batch: np.ndarray) -> jax.Array:
        """A batch on its devices. Every process has all of it, and keeps what its devices need."""
        sizes = dict(self.mesh.shape)
        names = tuple(name for name in BATCH if name in sizes)
        divides = names and batch.shape[0] % math.prod(sizes[name] for name in names) == 0
        sharding = NamedSharding(self.mesh, P(names if divides else None))
        return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
