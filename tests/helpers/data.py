"""What tests run on: layouts, gradients, a small problem to learn."""

import jax
import jax.numpy as jnp
import numpy as np

import lowrank_optax as lro

# Name -> (shape, target): one leaf called "w", read in every way that a layer is stored.
LAYOUTS = {
    "wide": ((6, 10), lro.Target(2)),
    "tall": ((10, 6), lro.Target(2)),
    "square": ((8, 8), lro.Target(2)),
    "query": ((6, 2, 5), lro.Target(2, 0, (1, 2))),
    "out": ((2, 5, 6), lro.Target(2, (0, 1), 2)),
    "heads_first": ((2, 7, 4), lro.Target(2, 1, (0, 2))),
    "stack": ((3, 6, 10), lro.Target(2, 1, 2)),
    "stack_in_the_middle": ((6, 3, 10), lro.Target(2, 0, 2)),
    "experts": ((2, 2, 6, 9), lro.Target(2, 2, 3)),
}


SIDES = ("smaller", "larger", "reduction", "output", "both")


def layout(name, side=None):
    """The shape and the target of one of LAYOUTS, with a side if one is given."""
    shape, target = LAYOUTS[name]
    axes = (target.reduction_axis, target.output_axis)
    return shape, lro.Target(target.rank, *axes, side=side)


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_like(tree, seed):
    """A tree of standard normal leaves, in the dtypes of ``tree``."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        treedef, [normal(seed * 1000 + i, x.shape, x.dtype) for i, x in enumerate(leaves)]
    )


def sequence(tree, steps, seed=0):
    """Gradients of several steps, stacked on a leading axis."""
    steps = [random_like(tree, seed + 1 + t) for t in range(steps)]
    return jax.tree.map(lambda *x: jnp.stack(x), *steps)


def at(tree, step):
    """One step of a stacked tree."""
    return jax.tree.map(lambda x: x[step], tree)


def regression(seed=0, dtype=jnp.float32):
    """A small two-layer regression: params, and a function to their loss and gradient.

    Its ``hidden`` and ``out`` are matrices that the tests project.
    """
    params = {
        "hidden": {"kernel": 0.3 * normal(seed, (8, 12), dtype), "bias": jnp.zeros(12, dtype)},
        "out": {"kernel": 0.3 * normal(seed + 1, (12, 4), dtype), "bias": jnp.zeros(4, dtype)},
    }
    x, true = normal(seed + 2, (32, 8)), normal(seed + 3, (8, 4))
    y = jnp.tanh(jnp.matmul(x, true))

    def loss(params):
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)

    return params, jax.value_and_grad(loss)


def scanned_loss(params, x):
    """Stacked layers under scan and remat, and one tall matrix, in the dtype of the params."""

    def layer(h, w):
        return h + jnp.tanh(jnp.matmul(h, w)), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(params["tall"].dtype), params["stack"])
    return jnp.mean(jnp.square(jnp.matmul(h, params["tall"]) - 0.5).astype(jnp.float32))


def scanned(dtype=jnp.float32):
    params = {"stack": 0.3 * normal(0, (3, 12, 12), dtype), "tall": 0.3 * normal(1, (12, 7), dtype)}
    targets = {"stack": lro.Target(3, 1, 2), "tall": lro.Target(2, 0, 1)}
    return params, targets, normal(2, (16, 12))
