"""What several test modules share: problems, layouts, oracles and loops."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowrank_optax as lro


def relaxed(tx):
    """An optimizer of optax, some of whose arithmetic mixes dtypes, under usual promotion.

    Everything around it, this library included, stays under the strict promotion of the
    tests.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def unchecked(fn):
    """A function without the type checks of the tests: what a user's wrong call meets."""
    return inspect.unwrap(fn)


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


@functools.cache
def _tracking(tracker):
    @jax.jit
    def run(params, gradients):
        def step(state, gradient):
            _, state = tracker.update(gradient, state)
            return state, state

        state = tracker.init(params)
        return state, jax.lax.scan(step, state, gradients)[1]

    return run


def track(tracker, params, gradients):
    """The states of a tracker before the first and after every step, stacked.

    Compiled once for each tracker object and kind of gradients.
    """
    start, states = _tracking(tracker)(params, gradients)
    return jax.tree.map(lambda a, b: np.concatenate([np.asarray(a)[None], b]), start, states)


@functools.cache
def _running(tx, apply):
    @jax.jit
    def loop(params, state, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            after = optax.apply_updates(params, updates) if apply else params
            return (after, state), (updates, state, params)

        return jax.lax.scan(step, (params, state), gradients)

    return loop


def run(tx, params, gradients, apply=True):
    """All updates, all states (the first one included) and the params that each step saw.

    One compiled loop for each optimizer object, whose carry must keep its types.
    """
    start = tx.init(params)
    _, (updates, states, seen) = _running(tx, apply)(params, start, gradients)
    states = jax.tree.map(lambda a, b: np.concatenate([np.asarray(a)[None], b]), start, states)
    return updates, states, seen


def train(tx, params, gradient_fn, steps, **extra_args):
    """Losses of all steps, then the params and the state at the end: one compiled loop."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(params, state, steps):
        def step(carry, _):
            params, state = carry
            loss, gradients = gradient_fn(params)
            extra = {"value": loss} if extra_args.get("value") else {}
            updates, state = tx.update(gradients, state, params, **extra)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), length=steps)

    (params, state), losses = run(params, tx.init(params), steps)
    return np.asarray(losses), params, state


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


def avals(tree):
    """Structure, shapes, dtypes and weak types: what a compiled step must not change."""
    leaves, treedef = jax.tree.flatten(tree)
    types = [jax.typeof(jnp.asarray(x)) for x in leaves]
    return treedef, [(t.shape, t.dtype, t.weak_type) for t in types]


def as_matrix(x, target, shape):
    """``(batch, m, n)`` in float64, by transposition and reshape: the slow way to a view."""

    def axes(given, default):
        given = default if given is None else given
        return (given,) if isinstance(given, int) else tuple(given)

    rows, columns = axes(target.reduction_axis, 0), axes(target.output_axis, 1)
    batch = tuple(a for a in range(len(shape)) if a not in rows + columns)
    m = int(np.prod([shape[a] for a in rows]))
    n = int(np.prod([shape[a] for a in columns]))
    order = batch + rows + columns
    matrix = np.asarray(x, np.float64).transpose(order).reshape(-1, m, n)

    def back(matrix):
        full = matrix.reshape([shape[a] for a in order])
        return full.transpose(np.argsort(order))

    return matrix, back


def basis_matrices(state, path="w"):
    """The two bases of a target as ``(batch, side, r)`` in float64; None where there is none."""
    leaf = next(leaf for leaf in state.plan.leaves if leaf.path == path)
    bases = []
    for tree in (state.reduction_basis, state.output_basis):
        x = tree[path] if isinstance(tree, dict) else tree
        if isinstance(x, optax.MaskedNode):
            bases.append(None)
        else:
            batch = int(np.prod(leaf.view.batch_shape))
            bases.append(np.asarray(x, np.float64).reshape(batch, -1, x.shape[-1]))
    return bases


def swap(x):
    return np.swapaxes(x, -1, -2)


def project(matrix, p, q):
    """``PᵀGQ``, where a basis that is None is the identity."""
    core = matrix if p is None else swap(p) @ matrix
    return core if q is None else core @ q


def lift(core, p, q):
    """``P C Qᵀ``, where a basis that is None is the identity."""
    full = core if p is None else p @ core
    return full if q is None else full @ swap(q)


def energy(matrix, p, q):
    """Share of the squared norm that the core keeps."""
    return np.sum(project(matrix, p, q) ** 2) / np.sum(matrix**2)


def assert_orthonormal(basis, tolerance=1e-5):
    """Checks a basis ``(batch, side, r)``."""
    identity = np.broadcast_to(np.eye(basis.shape[-1]), (*basis.shape[:-2], *[basis.shape[-1]] * 2))
    np.testing.assert_allclose(swap(basis) @ basis, identity, atol=tolerance)
