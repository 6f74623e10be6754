"""Training steps of a large model on the GPU or TPU at hand: time and peak memory.

Each optimizer has a process of its own, so that the device's peak is its own, and runs alone on
the device; others may compile meanwhile. Weights are random bfloat16, and so are tokens: neither
changes what a step costs.

  python -m benchmarks.speed.accelerator --model llama-7b --rank 128 --batch 1 --length 2048
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from benchmarks import harness

MODULE = "benchmarks.speed.accelerator"
OPTIMIZERS = ("adamw", "galore", "matrix-free", "sgd")


def measure(args: argparse.Namespace) -> dict[str, object]:
    """One optimizer: compiles, then makes weights and trains."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh

    from lowrank_optax._memory import decoder as abstract
    from lowrank_optax._memory import models as shapes
    from running.training import count_bytes

    device = jax.devices()[0]
    model = shapes.model_shape(args.model)
    loss = abstract.make_loss(model, Mesh(np.array([device]), ("data",)), remat=True)
    tx, matrix_free = abstract.make_optimizer(args.optimizer, args.rank)
    tx = optax.with_extra_args_support(tx)
    step = jax.jit(abstract.make_step(loss, tx, matrix_free), donate_argnums=(0, 1))

    params = shapes.abstract_params(model)
    state = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.int32)
    began = time.perf_counter()
    compiled = step.lower(params, state, tokens).compile()
    result: dict[str, object] = {
        "optimizer": args.optimizer,
        "model": args.model,
        "rank": args.rank,
        "tokens": args.batch * args.length,
        "compile_s": time.perf_counter() - began,
        "state_gb": count_bytes(state) / 1e9,
        "on": f"{harness.versions('jax', 'optax')}, {device.device_kind}",
    }

    def make_params(key):
        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(
            jnp.ones(leaf.shape, leaf.dtype)
            if leaf.ndim == 1
            else 0.02 * jax.random.normal(jax.random.fold_in(key, number), leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
        )

    def make_tokens(number):
        return jax.random.randint(jax.random.key(number), tokens.shape, 0, model.vocabulary)

    # All is compiled before the device is this process's alone.
    key = jax.eval_shape(lambda: jax.random.key(0))
    make_params = jax.jit(make_params).lower(key).compile()
    make_state = jax.jit(tx.init).lower(params).compile()
    make_tokens = jax.jit(make_tokens).lower(0).compile()
    with harness.turn(args.lock, alone=True):
        params = make_params(jax.random.key(0))
        state = jax.block_until_ready(make_state(params))
        seconds = []
        for number in range(args.steps + 1):
            batch = make_tokens(number).block_until_ready()
            began = time.perf_counter()
            params, state, value = compiled(params, state, batch)
            jax.block_until_ready((params, state))
            seconds.append(time.perf_counter() - began)
        stats = device.memory_stats() or {}
        spread = harness.Spread.of([1e3 * s for s in seconds[1:]])
        result |= {
            "first_step_ms": 1e3 * seconds[0],
            "step_ms": [spread.low, spread.median, spread.high],
            "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
            "compiler_gb": harness.peak_bytes(compiled) / 1e9,
            "loss": float(value),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-7b", help="a name that `lowrank-optax plan` knows"
    )
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10, help="timed, after the first")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="only this one, in this process")
    parser.add_argument("--lock", type=pathlib.Path, default=harness.RESULTS / "accelerator.lock")
    args = parser.parse_args()
    if args.optimizer:
        print(json.dumps(measure(args)), flush=True)
        return
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = harness.command(MODULE, "--lock", str(args.lock), "--model", args.model)
    for name in ("rank", "batch", "length", "steps"):
        command += [f"--{name}", str(getattr(args, name))]
    children = [
        subprocess.Popen([*command, "--optimizer", optimizer], env=environment)
        for optimizer in OPTIMIZERS
    ]
    codes = [child.wait() for child in children]
    if any(codes):
        sys.exit("an optimizer failed, see above")


if __name__ == "__main__":
    main()
