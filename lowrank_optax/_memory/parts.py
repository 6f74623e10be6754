"""What fills a device in one training step, counted: params, gradients, state, activations."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lowrank_optax._arrays.mesh import axis_names, fit, spec_of
from lowrank_optax._arrays.tree import OptState, Params, PyTree, by_path, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._memory.decoder import BATCH_AXES, make_optimizer
from lowrank_optax._memory.models import ModelShape, abstract_params, param_specs
from lowrank_optax._states.shardings import state_shardings
from lowrank_optax._subspace.state import SubspaceState

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
        activations: what else there is at the worst moment: layer inputs, one layer's or the
            logits' workspace, the weights of one layer where a mesh gathers them, what a refresh
            works on. An estimate.
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


def placed_params(setting: Setting, mesh: Any) -> Params:
    """The weights as shapes with shardings on ``mesh``, an abstract one or one of devices."""
    params = abstract_params(setting.model, setting.param_dtype)
    sizes = dict(mesh.shape)

    def place(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        names = [
            tuple(name for name in entry if name in sizes) for entry in axis_names(spec, x.ndim)
        ]
        names = fit(names, x.shape, sizes)
        sharding = NamedSharding(mesh, spec_of(names))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, params, param_specs(params))


def abstract_state(tx: optax.GradientTransformation, params: Params, moment_dtype: str) -> OptState:
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


def _tree_bytes(tree: PyTree) -> int:
    return sum(map(local_bytes, jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class _LowRank:
    """Bytes of what a low-rank optimizer's targets have, on one device.

    Attributes:
        cores: by path, each target's core in float32. It lies as its moments do.
        bases: all bases.
        moments: what the inner optimizer keeps of the targets.
        picked: a refresh of full gradients takes those of one shape in turns, and copies the one
            whose turn it is: the largest such copy.
        thin: what a refresh needs for one target, of the sizes of its basis and of its core.
    """

    cores: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bases: int = 0
    moments: int = 0
    picked: int = 0
    thin: int = 0


def _low_rank(params: Params, state: OptState) -> _LowRank:
    weights = by_path(params)
    on_cores = {
        p: kept for s in find_states(state, SubspaceState) for p, kept in s.on_cores().items()
    }
    cores, groups = {}, collections.defaultdict(list)
    bases = moments = thin = 0
    for tracker in find_states(state, TrackerState):
        bases += sum(map(local_bytes, jax.tree.leaves(tracker.stored())))
        opened = tracker.encoders()
        for projection, basis in zip(tracker.plan.projections, opened, strict=True):
            path, kept = projection.path, on_cores[projection.path]
            moments += sum(map(local_bytes, kept))
            cores[path] = local_bytes(kept[0]) // kept[0].dtype.itemsize * 4
            # A product, and it whitened; the old basis, the noise and the new one.
            wide = sum(local_bytes(b) // b.dtype.itemsize * 4 for b in jax.tree.leaves(basis))
            thin = max(thin, 2 * cores[path] + 3 * wide)
            weight = weights[path]
            alike = weight.shape, weight.sharding, projection.view, projection.sides
            groups[alike].append(local_bytes(weight))
    picked = max((max(sizes) for sizes in groups.values() if len(sizes) > 1), default=0)
    return _LowRank(cores, bases, moments, picked, thin)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """Bytes of one forward and backward pass, without gradients. Estimates.

    Attributes:
        inputs: of all layers, kept for the backward pass; without rematerialisation also
            what each layer keeps.
        layer: the workspace of one layer, with its weights where a mesh gathers them.
        logits: they and their gradient.
        copies: weights in another layout.
    """

    inputs: int
    layer: int
    logits: int
    copies: int


def _one_pass(setting: Setting, params: Params, platform: str | None) -> _Pass:
    model, item = setting.model, jnp.dtype(setting.param_dtype).itemsize
    tensor = setting.mesh.get("tp", 1)
    tokens = setting.local_batch * setting.length
    inputs = model.layers * tokens * model.width * item
    scores = setting.local_batch * model.heads / tensor * setting.length**2
    hidden = tokens * model.hidden / tensor
    thin = tokens * (model.query_width + 2 * model.key_width) / tensor
    # One array of float32 scores and one of attention weights at a time; the three hidden arrays
    # of SwiGLU and their gradients; queries, keys and values; a few more of the stream's size.
    layer = scores * (4 + item) + (hidden * 6 + thin * 3 + tokens * model.width * 6) * item
    # In float32.
    logits = tokens * model.vocabulary / tensor * 8
    if not setting.remat:
        inputs += model.layers * (scores * (4 + item) + hidden * 3 * item + thin * 2 * item)
    elif setting.mesh.get("fsdp", 1) > 1:
        # One layer's weights, whole but for tp, and the next one's that are fetched meanwhile.
        matrices = jax.tree.leaves(params["layers"])
        one = sum(local_bytes(x) / model.layers for x in matrices) * setting.mesh["fsdp"]
        layer += 2 * one
    copies = 0
    if platform == "tpu" and not model.attention_bias:
        # The TPU compiler wants these in the order that splitting heads off their product asks
        # for, and turns the stacks around before the loop. An addition in between prevents it.
        names = ("q_proj", "k_proj", "v_proj")
        copies = sum(local_bytes(params["layers"]["self_attn"][name]["kernel"]) for name in names)
    return _Pass(*map(round, (inputs, layer, logits, copies)))


def count_parts(setting: Setting, platform: str | None = None) -> Parts:
    """Counts the bytes on one device; nothing is allocated or compiled.

    Args:
        setting: what is planned.
        platform: ``"tpu"``, ``"gpu"`` or None: some copies only one compiler makes.
    """
    sizes = dict(setting.mesh) or {"fsdp": 1}
    axes = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
    params = placed_params(setting, mesh)
    tx, compact = make_optimizer(setting.optimizer, setting.rank)
    state = abstract_state(tx, params, setting.moment_dtype)
    low, work = _low_rank(params, state), _one_pass(setting, params, platform)
    gradients = {path: local_bytes(x) for path, x in by_path(params).items()}
    if compact:
        gradients |= low.cores
    total = sum(gradients.values())
    # The gradient of the head is there from the start, that of an embedding of its own last.
    blocks = sum(size for path, size in gradients.items() if path.startswith("layers/"))
    head = gradients.get("lm_head/kernel", gradients["embed_tokens/embedding"])
    backward = work.copies + work.inputs + max(work.logits, work.layer + blocks) + head
    peaks = [total, backward]
    if compact:
        # Bases and moments leave the branches of a refresh as new arrays, before the last pass.
        peaks = [x + low.bases + low.moments for x in peaks]
        # And in it the first pass's products are whitened, then needed for the second one.
        cores = sum(low.cores.values())
        peaks.append(work.copies + work.inputs + work.layer + 2 * (low.bases + cores))
    elif low.cores:
        peaks.append(total + low.picked + low.bases + low.thin)
    return Parts(
        params=_tree_bytes(params),
        gradients=total,
        moments=_tree_bytes(state) - low.bases,
        bases=low.bases,
        activations=max(peaks) - total,
    )
