"""How much memory a training step will take, and whether low rank is worth it there."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from lowrank_optax._checks import check_rank, choose
from lowrank_optax._memory.compiler import CompiledMemory, compile_step, parse_target
from lowrank_optax._memory.decoder import BATCH_AXES, OPTIMIZERS
from lowrank_optax._memory.devices import DEVICES
from lowrank_optax._memory.models import model_shape
from lowrank_optax._memory.parts import MESH_AXES, Parts, Setting, count_parts
from lowrank_optax._text import format_bytes

# A low-rank optimizer that saves less than this share of AdamW's step is not worth its tuning.
WORTHWHILE = 0.15


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What :func:`memory_plan` returns; ``print`` it for a table and a verdict.

    Attributes:
        setting: what was planned.
        parts: bytes on one device.
        adamw: the same for ``optax.adamw``.
        compiled: the compiler's figures, if it was asked.
        device_memory: bytes of the device, if one was named.
        device: its name.
    """

    setting: Setting
    parts: Parts
    adamw: Parts
    compiled: CompiledMemory | None = None
    device: str | None = None
    device_memory: int | None = None

    @property
    def peak(self) -> int:
        """Bytes on one device at the worst moment, by the compiler or else by the sum."""
        return self.parts.total if self.compiled is None else self.compiled.peak

    @property
    def saved(self) -> float:
        """The share of AdamW's bytes that are not needed, by the sums."""
        return 1 - self.parts.total / self.adamw.total

    @property
    def is_worthwhile(self) -> bool:
        """Whether low rank is worth it here; ``"matrix-free"`` where AdamW or SGD is planned."""
        return self._low_rank_saves() >= WORTHWHILE

    def _low_rank_saves(self) -> float:
        return 1 - self._low_rank().total / self.adamw.total

    def _low_rank(self) -> Parts:
        if self.setting.optimizer in ("adamw", "sgd"):
            low = dataclasses.replace(self.setting, optimizer="matrix-free")
            return count_parts(low, _platform(self.device))
        return self.parts

    @property
    def verdict(self) -> str:
        """One or two plain sentences."""
        low, adamw = self._low_rank(), self.adamw
        share = (adamw.moments + adamw.gradients) / adamw.total
        saves = self._low_rank_saves()
        facts = (
            f"gradients and optimizer state are {share:.0%} of AdamW's step, and low rank saves "
            f"{saves:.0%} of the whole"
        )
        memory = self.device_memory
        if memory is not None and low.total > memory:
            return (
                f"Does not fit: {facts}, but {format_bytes(low.total)} is more than the "
                f"{format_bytes(memory)} of {self.device}. Use more devices, fewer tokens a "
                "device, or a lower rank."
            )
        if memory is not None and adamw.total > memory:
            return (
                f"Worth it: AdamW does not fit in the {format_bytes(memory)} of {self.device} and "
                f"this does; {facts}."
            )
        if saves >= WORTHWHILE:
            return f"Worth it: {facts}."
        if adamw.activations > max(adamw.params, adamw.gradients + adamw.moments):
            return (
                f"Not worth it: most of the memory is activations; {facts}. Rematerialise, "
                "shorten the sequences or split the batch first."
            )
        return f"Not worth it: {facts}. AdamW is simpler."

    def __str__(self) -> str:
        setting = self.setting
        mesh = ",".join(f"{name}={size}" for name, size in setting.mesh.items()) or "1 device"
        lines = [
            f"{setting.model.name}, {setting.optimizer}, rank {setting.rank}, {mesh}, "
            f"{setting.batch} x {setting.length} tokens, {setting.param_dtype} weights, "
            f"{setting.moment_dtype} moments",
            f"{'bytes on one device':24}{setting.optimizer:>14}{'adamw':>12}",
        ]
        for name, value in dataclasses.asdict(self.parts).items():
            other = getattr(self.adamw, name)
            lines.append(f"{name:24}{format_bytes(value):>14}{format_bytes(other):>12}")
        totals = format_bytes(self.parts.total), format_bytes(self.adamw.total)
        lines.append(f"{'sum':24}{totals[0]:>14}{totals[1]:>12}")
        if self.compiled is not None:
            off = self.parts.total / self.compiled.peak - 1
            lines.append(
                f"{'peak by the compiler':24}{format_bytes(self.compiled.peak):>14}"
                f"{'':12}  (the sum is {abs(off):.0%} {'above' if off >= 0 else 'below'} it)"
            )
            if self.compiled.alive:
                alive = format_bytes(self.compiled.alive)
                lines.append(f"{'of it in use at once':24}{alive:>14}")
            for kind, size in self.compiled.collectives.items():
                lines.append(f"{kind + ' a step':24}{format_bytes(size):>14}")
        return "\n".join([*lines, self.verdict])


def _platform(device: str | None) -> str | None:
    return None if device is None else DEVICES[device].platform


def parse_mesh(mesh: Any) -> dict[str, int]:
    """``{"fsdp": 4, "tp": 2}`` from itself or from ``"fsdp=4,tp=2"``."""
    if isinstance(mesh, str):
        pairs = [part.partition("=") for part in mesh.split(",") if part]
        mesh = {name.strip(): value.strip() for name, _, value in pairs}
        if len(mesh) < len(pairs):
            raise ValueError("mesh names an axis twice")
    sizes = {}
    for name, size in (mesh or {}).items():
        choose("mesh axis", name, MESH_AXES)
        if not str(size).isdecimal() or int(size) < 1:
            raise ValueError(f"mesh: {name}={size} is no size; write it as in fsdp=4,tp=2")
        sizes[name] = int(size)
    return sizes


def memory_plan(
    model: Any,
    optimizer: str = "matrix-free",
    *,
    rank: int | float = 128,
    mesh: Any = None,
    param_dtype: str = "bfloat16",
    moment_dtype: str = "float32",
    batch: int = 1,
    length: int = 2048,
    remat: bool = True,
    device: str | None = None,
    compiler: str | None = None,
) -> MemoryPlan:
    """Counts the memory of one training step of a decoder, per device.

    Weights, gradients and optimizer state are exact; activations are an estimate for plain
    attention (no fused kernel is assumed). Nothing is allocated. With ``compiler`` a real TPU or
    GPU compiler is asked, which needs no device but takes minutes for a large model.

    Args:
        model: a name such as ``"llama-7b"``, the path or the contents of a Hugging Face
            ``config.json`` of the LLaMA, Mistral or Qwen family.
        optimizer: ``"adamw"``, ``"galore"`` (on full gradients), ``"matrix-free"`` or ``"sgd"``.
        rank: of the block matrices, an int, or a float as a share of their smaller side.
        mesh: sizes of the axes ``data``, ``fsdp`` and ``tp``, as a dict or ``"fsdp=4,tp=2"``;
            None for one device. Weights are split by ``fsdp`` along the width and by ``tp`` along
            heads, hidden units and vocabulary, the batch by ``data`` and ``fsdp``.
        param_dtype: of weights and activations.
        moment_dtype: of moments, or ``"param"`` for what the optimizer chooses by itself.
        batch: sequences a step, over all devices.
        length: tokens a sequence.
        remat: whether layers are recomputed in the backward pass.
        device: a device to fit, such as ``"v5e"`` or ``"h100"``, for the verdict.
        compiler: such as ``"tpu:v5p:2x2x1"`` or ``"gpu:h100"``: compile the step for it.

    Returns:
        The plan; print it.

    Raises:
        ValueError: if a name or a size is wrong; the message lists the choices.
        RuntimeError: if the compiler is not installed, or refuses the step.

    Example:
        >>> import lowrank_optax as lro
        >>> plan = lro.memory_plan("llama-7b", "matrix-free", rank=128)
        >>> f"{plan.parts.gradients / plan.adamw.gradients:.2f}"
        '0.10'
        >>> plan.is_worthwhile
        True
    """
    choose("optimizer", optimizer, OPTIMIZERS)
    check_rank(rank, "rank")
    sizes = parse_mesh(mesh)
    for name, value in (("param_dtype", param_dtype), ("moment_dtype", moment_dtype)):
        choose(name, value, ("bfloat16", "float16", "float32", *(["param"] * (name[0] == "m"))))
        if value != "param":
            jnp.dtype(value)
    for name, value in (("batch", batch), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    split = math.prod(sizes.get(name, 1) for name in BATCH_AXES)
    if batch % split:
        raise ValueError(
            f"batch={batch} is not divided by the {split} devices that the mesh splits it over; "
            f"use a multiple of {split}"
        )
    if compiler is not None:
        named = parse_target(compiler)[1]
        device = named if device is None else device
    memory = None if device is None else DEVICES[choose("device", device, DEVICES)].memory
    setting = Setting(
        model_shape(model),
        optimizer,
        rank,
        sizes,
        param_dtype,
        moment_dtype,
        batch,
        length,
        remat,
    )
    parts = count_parts(setting, _platform(device))
    adamw = count_parts(dataclasses.replace(setting, optimizer="adamw"), _platform(device))
    compiled = None
    if compiler is not None:
        compiled = compile_step(compiler, dataclasses.asdict(setting))
    return MemoryPlan(setting, parts, adamw, compiled, device, memory)
