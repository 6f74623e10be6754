"""Devices to plan for."""

import dataclasses

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to plan for.

    Attributes:
        memory: bytes.
        platform: ``"tpu"`` or ``"gpu"``.
    """

    memory: int
    platform: str


DEVICES = {
    "v4": Device(32 * 2**30, "tpu"),
    "v5e": Device(16 * 2**30, "tpu"),
    "v5p": Device(95 * 2**30, "tpu"),
    "v6e": Device(32 * 2**30, "tpu"),
    "a100": Device(80 * GB, "gpu"),
    "h100": Device(80 * GB, "gpu"),
    "h200": Device(141 * GB, "gpu"),
}


# The cards that the worker can describe to the GPU compiler.
GPUS = ("h100",)
