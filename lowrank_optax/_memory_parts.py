"""What fills a device in one training step, counted: params, gradients, state, activations."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lowrank_optax import _placement, _tree
from lowrank_optax._abstract_step import BATCH_AXES, make_optimizer
from lowrank_optax._model_shapes import ModelShape, abstract_params, param_specs
from lowrank_optax._sharding import state_shardings
from lowrank_optax._state import TrackerState, find_states

MESH_AXES = (*BATCH_AXES, "tp")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is planned.

    Attributes:
        model: its shape.
        optimizer: a name.
        rank: of the projection.
        mesh: the size of each mesh axis.
        param_dtype: of weights and activations.
        moment_dtype: of the inner optimizer's moments; ``"param"`` for the optimizer's own choice.
        batch: sequences a step, over all devices.
        length: tokens a sequence.
        remat: whether layers are recomputed in the backward pass.
    """

    model: ModelShape
    optimizer: str
    rank: int | float
    mesh: Mapping[str, int]
    param_dtype: str = "bfloat16"
    moment_dtype: str = "float32"
    batch: int = 1
    length: int = 2048
    remat: bool = True

    @property
    def local_batch(self) -> int:
        """Sequences on one device."""
        return self.batch // math.prod(self.mesh.get(name, 1) for name in BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on one device.

    Attributes:
        params: the weights.
        gradients: what the backward pass leaves, cores where these are made directly.
        moments: what the inner optimizer keeps, and the counters.
        bases: the bases of the subspaces.
        activations: the rest: layer inputs, one layer's or the logits' workspace, the weights
            of one layer where a mesh gathers them, a refresh's thin matrices. An estimate.
    """

    params: int
    gradients: int
    moments: int
    bases: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def batch_spec(mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that a batch is split over."""
    return tuple(name for name in BATCH_AXES if name in mesh) or None


def placed_params(setting: Setting, mesh: Any) -> Any:
    """The weights as shapes with shardings on ``mesh``, an abstract one or one of devices."""
    params = abstract_params(setting.model, setting.param_dtype)
    sizes = dict(mesh.shape)

    def place(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        names = [
            tuple(name for name in entry if name in sizes)
            for entry in _placement.axis_names(spec, x.ndim)
        ]
        names = _placement.fit(names, x.shape, sizes)
        sharding = NamedSharding(mesh, _placement.spec_of(names))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, params, param_specs(params))


def abstract_state(tx: optax.GradientTransformation, params: Any, moment_dtype: str) -> Any:
    """The optimizer's state as shapes with shardings, moments in a dtype of their own."""

    def place(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        dtype = x.dtype
        if moment_dtype != "param" and jnp.issubdtype(dtype, jnp.floating) and x.ndim:
            dtype = jnp.dtype(moment_dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(tx.init, params), state_shardings(tx, params))


def local_bytes(x: jax.ShapeDtypeStruct) -> int:
    """What one device holds of a sharded array."""
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _tree_bytes(tree: Any) -> int:
    return sum(map(local_bytes, jax.tree.leaves(tree)))


def _core_bytes(params: Any, state: Any) -> dict[str, int]:
    """The compact gradient of each target, in float32 and on the mesh axes of its own side."""
    sizes = {}
    weights = _tree.by_path(params)
    for tracker in find_states(state, TrackerState):
        for index in tracker.plan.targets:
            leaf = tracker.plan.leaves[index]
            weight = weights[leaf.path]
            assert leaf.view is not None
            spec = _placement.axis_names(weight.sharding.spec, weight.ndim)
            axes = leaf.view.core_leaf_axes(leaf.sides)
            names = [() if axis is None else spec[axis] for axis in axes]
            own = NamedSharding(weight.sharding.mesh, _placement.spec_of(names))
            sizes[leaf.path] = math.prod(own.shard_shape(leaf.core_shape)) * 4
    return sizes


def _activation_bytes(setting: Setting, params: Any) -> int:
    """Layer inputs, and the largest of what is needed one at a time."""
    model, item = setting.model, jnp.dtype(setting.param_dtype).itemsize
    tensor = setting.mesh.get("tp", 1)
    tokens = setting.local_batch * setting.length
    boundaries = model.layers * tokens * model.width * item
    scores = setting.local_batch * model.heads / tensor * setting.length**2
    hidden = tokens * model.hidden / tensor
    thin = tokens * (model.query_width + 2 * model.key_width) / tensor
    # One array of float32 scores and one of attention weights at a time; the three hidden arrays
    # of SwiGLU and their gradients; queries, keys and values; a few more of the stream's size.
    layer = scores * (4 + item) + (hidden * 6 + thin * 3 + tokens * model.width * 6) * item
    # Logits and their gradient in float32.
    logits = tokens * model.vocabulary / tensor * 8
    if not setting.remat:
        kept = scores * (4 + item) + hidden * 3 * item + thin * 2 * item
        return round(boundaries + model.layers * kept + max(layer, logits))
    gathered = 0.0
    if setting.mesh.get("fsdp", 1) > 1:
        # One layer's weights, whole but for tp, and the next one's that are fetched meanwhile.
        matrices = jax.tree.leaves(params["layers"])
        one = sum(local_bytes(x) / model.layers for x in matrices) * setting.mesh["fsdp"]
        gathered = 2 * one
    return round(boundaries + max(layer + gathered, logits))


def count_parts(setting: Setting) -> Parts:
    """Counts the bytes on one device; nothing is allocated or compiled."""
    sizes = dict(setting.mesh) or {"fsdp": 1}
    axes = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
    params = placed_params(setting, mesh)
    tx, compact = make_optimizer(setting.optimizer, setting.rank)
    state = abstract_state(tx, params, setting.moment_dtype)
    bases = sum(
        _tree_bytes((tracker.reduction_basis, tracker.output_basis))
        for tracker in find_states(state, TrackerState)
    )
    gradients = {path: local_bytes(x) for path, x in _tree.by_path(params).items()}
    workspace = 0
    if compact:
        cores = _core_bytes(params, state)
        gradients |= cores
        # A refresh holds another basis, and images of it of the size of cores.
        workspace = bases + sum(cores.values())
    return Parts(
        params=_tree_bytes(params),
        gradients=sum(gradients.values()),
        moments=_tree_bytes(state) - bases,
        bases=bases,
        activations=_activation_bytes(setting, params) + workspace,
    )
