"""Thousands of refreshes in a row, for a fault that shows once in hundreds; not run by pytest.

Batched LAPACK calls of jaxlib 0.10 can wait for each other for ever on a CPU with few cores, so
this library makes none there. A step that never returns prints the stack of every thread and ends
the script with exit status 1::

    python tests/endurance.py --steps 20000
"""

import argparse
import faulthandler
import functools
import os
import time

# OpenBLAS's threads wait by spinning: on a busy machine a step would take a second.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp

import lowrank_optax as lro

# Two stacks, so that two calls can meet, of matrices that are large enough: jaxlib divides a
# batched call among threads from 200,000 operations on, and XLA a product.
SHAPES = {"up": (8, 256, 768), "down": (8, 768, 256)}
RANK = 32
TARGETS = [(".*", lro.Target(RANK, reduction_axis=1, output_axis=2))]
OPTIMIZERS = {
    "lowrank_adamw": functools.partial(lro.lowrank_adamw, 1e-3, RANK, 1, targets=TARGETS),
    "galore_adamw": functools.partial(lro.galore_adamw, 1e-3, RANK, 1, targets=TARGETS),
}


def main() -> None:
    """Runs the steps and says every ten seconds how many are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lowrank_adamw")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--patience", type=float, default=60, help="seconds that a step may take")
    arguments = parser.parse_args()
    tx = OPTIMIZERS[arguments.optimizer]()
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    gradients = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    # Compiled separately, since compiling takes longer than any step may.
    state = tx.init(gradients)
    step = jax.jit(tx.update).lower(gradients, state, gradients).compile()
    start = said = time.monotonic()
    for number in range(1, arguments.steps + 1):
        faulthandler.dump_traceback_later(arguments.patience, exit=True)
        updates, state = jax.block_until_ready(step(gradients, state, gradients))
        if time.monotonic() - said > 10 or number == arguments.steps:
            said = time.monotonic()
            finite = all(bool(jnp.all(jnp.isfinite(x))) for x in updates.values())
            print(f"{number} steps, {said - start:.0f} s, finite: {finite}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print("done")


if __name__ == "__main__":
    main()
