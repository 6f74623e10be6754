"""The process in which :mod:`lowrank_optax._memory.compiler` compiles. Reads JSON, prints JSON."""

import json
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowrank_optax._memory import decoder, hlo
from lowrank_optax._memory.models import ModelShape
from lowrank_optax._memory.parts import Setting, abstract_state, batch_spec, placed_params

# What the GPU compiler asks about a card: the public figures of an H100 SXM.
_H100 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
"""


def _devices(platform: str, device: str, topology: str) -> list[Any]:
    if platform == "tpu":
        found = topologies.get_topology_desc(topology_name=f"{device}:{topology}", platform="tpu")
    else:
        found = topologies.get_topology_desc(
            topology_name=device,
            platform="cuda",
            topology=f"1x1x{topology}",
            target_config=_H100,
        )
    return list(found.devices)


def _optimizer(setting: Setting) -> tuple[optax.GradientTransformation, bool]:
    if setting.optimizer == "optax.contrib.galore":
        from optax import contrib

        return contrib.galore(1e-3, rank=int(setting.rank)), False
    return decoder.make_optimizer(setting.optimizer, setting.rank)


def build(devices: list[Any], setting: Setting) -> dict[str, Any]:
    """Compiles one step and returns the compiler's figures."""
    start = time.time()
    sizes = setting.mesh or {"fsdp": 1}
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(f"a mesh of {count} devices does not fit on {len(devices)}")
    mesh = Mesh(
        np.array(devices[:count]).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    params = placed_params(setting, mesh)
    tx, matrix_free = _optimizer(setting)
    state = abstract_state(tx, params, setting.moment_dtype)
    tokens = jax.ShapeDtypeStruct(
        (setting.batch, setting.length),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(batch_spec(sizes))),
    )
    loss = decoder.make_loss(setting.model, mesh, setting.remat)
    step = decoder.make_step(loss, tx, matrix_free)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, replicated))
    compiled = jitted.lower(params, state, tokens).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise RuntimeError("this compiler reports no memory")
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "peak": kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "collectives": hlo.bytes_by_kind(hlo.collectives(text)),
        "seconds": time.time() - start,
        "alive": getattr(memory, "peak_memory_in_bytes", 0),
    }


def main() -> None:
    """Answers the one request on standard input."""
    request = json.loads(sys.stdin.read())
    step = request.pop("step")
    step["model"] = ModelShape(**step["model"])
    try:
        result = build(_devices(**request), Setting(**step))
    except Exception as error:
        # Whatever a compiler throws is an answer to the question.
        text = " ".join(str(error).split())
        result = {"error": f"{type(error).__name__}: {text[:600]}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
