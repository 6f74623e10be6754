"""One process of ``test_processes.py``: trains on all devices there are, and prints what it saw.

Usage: ``process_worker.py PORT PROCESSES NUMBER``.
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro

SHAPES = {"down": (32, 16), "up": (16, 32)}
SPECS = {"down": P("tp", "fsdp"), "up": P("fsdp", "tp")}
STEPS = 4


def array(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean((x + jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def run():
    """Losses of a matrix-free run with two refreshes, and a digest of the bases as seen here."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def placed(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    params = {n: placed(0.2 * array(i, s), SPECS[n]) for i, (n, s) in enumerate(SHAPES.items())}
    tx = lro.galore_adamw(1e-2, 4, 2)
    shardings = lro.state_shardings(tx, params)
    gradient = lro.compact_value_and_grad(loss_fn)

    @jax.jit
    def step(params, state, x):
        value, grads, bases = gradient(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return optax.apply_updates(params, updates), state, value

    state = jax.jit(tx.init, out_shardings=shardings)(params)
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    losses, digests = [], []
    for _ in range(STEPS):
        x = placed(array(10, (8, 16)), P("fsdp"))
        params, state, value = step(params, state, x)
        losses.append(float(value))
        tracker = everywhere(state.tracker_state)
        bases = jax.tree.leaves((tracker.reduction_basis, tracker.output_basis))
        digests.append(hashlib.sha256(b"".join(np.asarray(b).tobytes() for b in bases)).hexdigest())
    return {
        "losses": losses,
        "bases": digests,
        "refreshes": np.asarray(everywhere(state.tracker_state.refreshes)).tolist(),
        "devices": [jax.local_device_count(), jax.device_count()],
    }


if __name__ == "__main__":
    port, processes, number = map(int, sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", processes, number)
    print(json.dumps(run()), flush=True)
    jax.distributed.shutdown()
