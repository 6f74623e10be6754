"""A worker of ``step_time.py``: one JAX optimizer, a train step and an update alone."""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro
from benchmarks import harness, plain_decoder

NEVER = 10**9
RATE = 1e-3


def _targets(params, entry):
    """A tree with ``entry`` at each matrix of a block and None elsewhere."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: entry if plain_decoder.is_block_matrix(str(path[-1].key)) else None, params
    )


def optimizer(name: str, params, rank: int, every: int) -> optax.GradientTransformation:
    """A contender; ``every=1`` makes each step a refresh, ``NEVER`` only the first."""
    if name == "optax.adamw":
        return optax.adamw(RATE)
    if name == "lro.galore_adamw":
        return lro.galore_adamw(RATE, rank, every, targets=_targets(params, lro.Target(rank)))
    if name == "optax.contrib.galore":
        numbers = _targets(params, optax.contrib.GaLoreDimensionNumbers())
        return optax.contrib.galore(
            RATE, rank=rank, update_proj_gap=every, scale=0.25, weight_dimension_numbers=numbers
        )
    raise ValueError(f"no contender is called {name!r}")


class Task:
    """A compiled, donating ``(params, state, data) -> (params, state)`` that goes on and on."""

    def __init__(self, fn, tx, params, data):
        self.params = jax.tree.map(jnp.array, params)
        self.state = jax.jit(tx.init)(self.params)
        self.data, self.turn = data, 0
        start = time.perf_counter()
        lowered = jax.jit(fn, donate_argnums=(0, 1)).lower(self.params, self.state, data[0])
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - start
        for _ in range(2):
            self()

    def __call__(self) -> None:
        """Runs once and waits."""
        data = self.data[self.turn % len(self.data)]
        self.turn += 1
        self.params, self.state = self.compiled(self.params, self.state, data)
        jax.block_until_ready((self.params, self.state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--size", type=json.loads, default={})
    parser.add_argument("--rank", type=int, default=128)
    args = parser.parse_args()
    size = plain_decoder.Size(**args.size)
    params = jax.tree.map(jnp.asarray, plain_decoder.init(size))
    tokens = list(jnp.asarray(plain_decoder.batches(size, 4)))
    grads = [jax.jit(jax.grad(plain_decoder.loss))(params, tokens[0])]

    def make(every: int, full_step: bool) -> Task:
        tx = optimizer(args.contender, params, args.rank, every)

        def update(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def step(params, state, tokens):
            return update(params, state, jax.grad(plain_decoder.loss)(params, tokens))

        return Task(step if full_step else update, tx, params, tokens if full_step else grads)

    tasks = {"step": make(NEVER, True), "update": make(NEVER, False)}
    if args.contender != "optax.adamw":
        tasks["refresh"] = make(1, False)
    compile_s = {name: task.compile_s for name, task in tasks.items()}
    harness.serve(dict(tasks), {"compile_s": compile_s})


if __name__ == "__main__":
    main()
