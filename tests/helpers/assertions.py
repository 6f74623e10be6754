"""What tests compare: matrices behind leaves, shapes and dtypes, orthonormality."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax


def unchecked(fn):
    """A function without the type checks of the tests: what a user's wrong call meets."""
    return inspect.unwrap(fn)


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
