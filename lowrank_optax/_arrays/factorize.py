"""Factorizations of small matrices: every LAPACK call of this library is made here.

On a CPU a stack of matrices is factorized one matrix after another. jaxlib 0.10 divides a batched
LAPACK call into tasks for XLA's thread pool, and waits for them on a thread of that same pool. Two
such calls at once, for two stacks say, hold both threads that a machine with two cores has: nobody
is left to run the tasks, and a training step never returns. (Seen with jaxlib 0.10.2, not with
0.12.0.) A call with one matrix has no tasks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import on_replicated
from lowrank_optax._arrays.mesh import place


def _one_after_another(factorize: Callable[[Array], Any], x: Array) -> Any:
    """A batched factorization in a loop over its matrices; a single one needs no loop."""
    batch = x.shape[:-2]
    matrices = x.reshape(-1, *x.shape[-2:])
    if math.prod(batch) == 1:
        return jax.tree.map(lambda y: y.reshape(*batch, *y.shape), factorize(matrices[0]))
    results = jax.lax.map(factorize, matrices)
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), results)


def _unbatched_on_cpu(factorize: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """A factorization of ``(*batch, m, n)`` that makes no batched LAPACK call on a CPU.

    The platform is the one that is compiled for, which need not be this machine's: the others
    keep the batched form.
    """

    def by_platform(x: Array) -> Any:
        if x.ndim == 2:
            return factorize(x)
        in_loop = functools.partial(_one_after_another, factorize)
        return jax.lax.platform_dependent(x, cpu=in_loop, default=factorize)

    # JAX would vectorize the body of the loop, and so batch its calls again.
    of_stack = custom_vmap(by_platform)

    @of_stack.def_vmap
    def with_one_more_axis(axis_size: int, in_batched: Any, x: Array) -> tuple[Any, Any]:
        results = on_replicated(of_stack, x)
        along = jax.tree.map(lambda y: place(y, [0] + [None] * (y.ndim - 1), x), results)
        return along, jax.tree.map(lambda y: True, results)

    # A rule for vmap has no derivative. So under grad and vmap at once calls are batched after all.
    differentiable = jax.custom_jvp(of_stack)

    @differentiable.defjvp
    def with_tangent(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return jax.jvp(by_platform, primals, tangents)

    # Outside of jit too, it is compiled once for each shape.
    compiled = jax.jit(differentiable)
    return lambda x: on_replicated(compiled, x)


@_unbatched_on_cpu
def _inverse_factor(squares: Array) -> Array:
    factor = jnp.linalg.cholesky(squares)
    identity = jnp.eye(squares.shape[-1], dtype=squares.dtype)
    root = jax.scipy.linalg.solve_triangular(
        factor, jnp.broadcast_to(identity, factor.shape), lower=True
    )
    return jnp.swapaxes(root, -1, -2)


@_unbatched_on_cpu
def _eigenvectors(symmetric: Array) -> Array:
    return jnp.linalg.eigh(symmetric)[1][..., ::-1]


@_unbatched_on_cpu
def _singular_vectors(matrices: Array) -> tuple[Array, Array]:
    left, _, right = jnp.linalg.svd(matrices, full_matrices=False)
    return left, jnp.swapaxes(right, -1, -2)


def inverse_factor(squares: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """``L⁻ᵀ`` of positive definite matrices ``L Lᵀ``, by Cholesky; NaN of others."""
    return _inverse_factor(squares)


def eigenvectors(symmetric: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The orthonormal eigenvectors of symmetric matrices as columns, largest eigenvalue first."""
    return _eigenvectors(symmetric)


def singular_vectors(
    matrices: Float[Array, "*batch m n"],
) -> tuple[Float[Array, "*batch m k"], Float[Array, "*batch n k"]]:
    """The left and the right singular vectors as columns, ``min(m, n)`` each, largest first."""
    return _singular_vectors(matrices)
