"""Asking a real compiler how much memory a training step takes, without the device.

XLA's TPU and GPU compilers run on any machine. They run in a process of their own here, since
they want an environment of theirs, and a compiler that dies must not take its caller along.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lowrank_optax._checks import choose
from lowrank_optax._memory.devices import DEVICES, GPUS

"""Devices by name, with their memory."""


_EXTRAS = {
    "tpu": ("libtpu", "jax[tpu]"),
    "gpu": ("jax_cuda12_plugin", "jax[cuda12]"),
}


class CompileError(RuntimeError):
    """The compiler refused a step, or could not be run. The message says why."""


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """What a compiler says of one step, on one device.

    Attributes:
        peak: bytes that it reserves, arguments included.
        arguments: bytes of params, state and tokens.
        temporaries: bytes of everything in between.
        collectives: bytes a step by kind of collective; a refresh of bases is not in it.
        seconds: that tracing and compiling took.
        alive: bytes of ``peak`` in use at the worst moment; the rest are gaps between arrays.
    """

    peak: int
    arguments: int
    temporaries: int
    collectives: Mapping[str, int]
    seconds: float
    alive: int = 0


def parse_target(target: str) -> tuple[str, str, str]:
    """``(platform, device, topology)`` of ``"tpu:v5p:2x2x1"`` or ``"gpu:h100"``."""
    platform, _, rest = target.partition(":")
    choose("compiler", platform, _EXTRAS)
    device, _, topology = rest.partition(":")
    if platform == "tpu":
        choose("TPU", device, [name for name, d in DEVICES.items() if d.platform == "tpu"])
        sizes = topology.split("x")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(
                f"{target!r}: a TPU target names a topology, such as tpu:v5p:2x2x1 or tpu:v6e:2x4"
            )
        return platform, device, topology
    choose("GPU", device, GPUS)
    if topology and not (topology.isdecimal() and int(topology)):
        raise ValueError(f"{target!r}: a GPU target may name a number of cards, such as gpu:h100:8")
    return platform, device, topology or "1"


def check_installed(target: str) -> None:
    """Raises :class:`CompileError` that says what to install for ``target``."""
    platform, _, _ = parse_target(target)
    module, package = _EXTRAS[platform]
    if importlib.util.find_spec(module) is None:
        raise CompileError(
            f"compiling for {target} needs the compiler in {package}, which is not installed: "
            f'pip install "{package}"'
        )


def compile_step(target: str, step: Mapping[str, Any], timeout: float = 3600) -> CompiledMemory:
    """Compiles one training step for a device that need not be here.

    Args:
        target: such as ``"tpu:v5p:2x2x1"`` or ``"gpu:h100:8"``.
        step: the arguments of the worker's ``build``, as JSON values.
        timeout: seconds.

    Returns:
        The compiler's figures.

    Raises:
        CompileError: if the compiler is missing, refuses the step or dies.
    """
    check_installed(target)
    platform, device, topology = parse_target(target)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    if platform == "tpu":
        # The compiler looks for a TPU host's metadata unless it is told that this is none; and it
        # wants to be the only process with a TPU, of which a compilation needs none.
        for name, value in {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }.items():
            environment.setdefault(name, value)
    request = {"platform": platform, "device": device, "topology": topology, "step": dict(step)}
    command = [sys.executable, "-m", "lowrank_optax._memory.worker"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"compiling for {target} took more than {timeout:.0f} s") from None
    # Libraries may print before it.
    answer = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if answer is None:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise CompileError(f"the compiler for {target} died: {last[0][:400]}")
    result = json.loads(answer)
    if "error" in result:
        raise CompileError(result["error"])
    return CompiledMemory(**result)
