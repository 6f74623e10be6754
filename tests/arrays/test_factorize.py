"""Factorizations of stacks: against NumPy, and never in one LAPACK call on a CPU."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowrank_optax as lro
from lowrank_optax._arrays import factorize
from lowrank_optax._arrays.orthonormal import gram, inverse
from tests.helpers.data import normal
from tests.helpers.loops import relaxed

BATCHES = [(), (1,), (3,), (2, 3), (0,)]
# What a batch shape is called under vmap: how many of its axes JAX adds.
MAPPED = [((3,), 1), ((2, 3), 1), ((2, 3), 2)]


def squares(batch, size=6):
    x = normal(0, (*batch, size, 2 * size))
    return jnp.matmul(x, jnp.swapaxes(x, -1, -2))


def check_inverse_factor(matrices, factor):
    reference = np.linalg.inv(np.linalg.cholesky(np.asarray(matrices, np.float64)))
    np.testing.assert_allclose(factor, np.swapaxes(reference, -1, -2), rtol=1e-4, atol=1e-5)


def check_eigenvectors(matrices, vectors):
    _, reference = np.linalg.eigh(np.asarray(matrices, np.float64))
    signs = np.sign(np.sum(vectors * reference[..., ::-1], axis=-2, keepdims=True))
    np.testing.assert_allclose(vectors * signs, reference[..., ::-1], atol=1e-4)


def check_singular_vectors(matrices, both):
    left, right = both
    reference = np.linalg.svd(np.asarray(matrices, np.float64), full_matrices=False)
    values = np.swapaxes(left, -1, -2) @ np.asarray(matrices, np.float64) @ right
    expected = reference[1][..., None] * np.eye(values.shape[-1])
    np.testing.assert_allclose(values, expected, atol=1e-4)
    signs = np.sign(np.sum(left * reference[0], axis=-2, keepdims=True))
    np.testing.assert_allclose(left * signs, reference[0], atol=1e-4)
    np.testing.assert_allclose(right * signs, np.swapaxes(reference[2], -1, -2), atol=1e-4)


# Name -> (function, its argument for a batch shape, comparison with NumPy).
FACTORIZATIONS = {
    "inverse factor": (factorize.inverse_factor, squares, check_inverse_factor),
    "eigenvectors": (factorize.eigenvectors, squares, check_eigenvectors),
    "singular vectors, tall": (
        factorize.singular_vectors,
        lambda batch: normal(1, (*batch, 7, 4)),
        check_singular_vectors,
    ),
    "singular vectors, wide": (
        factorize.singular_vectors,
        lambda batch: normal(2, (*batch, 4, 7)),
        check_singular_vectors,
    ),
}
everyone = pytest.mark.parametrize("name", FACTORIZATIONS)


@everyone
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_against_numpy(name, batch, compiled):
    function, make, check = FACTORIZATIONS[name]
    x = make(batch)
    check(x, (jax.jit(function) if compiled else function)(x))


@everyone
@pytest.mark.parametrize(("batch", "axes"), MAPPED, ids=str)
def test_vmap(name, batch, axes):
    function, make, check = FACTORIZATIONS[name]
    for _ in range(axes):
        function = jax.vmap(function)
    x = make(batch)
    check(x, jax.jit(function)(x))


def test_vmap_of_another_axis_in_a_loop():
    x = squares((2, 3, 4))
    inner = jax.vmap(factorize.inverse_factor, in_axes=1, out_axes=1)
    check_inverse_factor(x, jax.jit(lambda x: jax.lax.map(inner, x))(x))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "y", "x")], ids=str)
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_sharded_stacks(kind, spec, axes):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    x = squares((2, 4))
    function = factorize.inverse_factor
    for _ in range(axes):
        function = jax.vmap(function)
    with jax.set_mesh(mesh):
        check_inverse_factor(x, jax.jit(function)(jax.device_put(x, NamedSharding(mesh, spec))))


def test_derivatives():
    """Forwards and backwards, against a difference quotient."""
    x, direction = squares((2,), 3), squares((2,), 3) * 1e-3

    def of(scale):
        moved = x + scale * direction
        return jnp.sum(jnp.sin(inverse(gram(moved, moved, 1))))

    expected = (of(1.0) - of(-1.0)) / 2
    for derivative in (jax.grad(of), jax.jacfwd(of)):
        np.testing.assert_allclose(derivative(0.0), expected, rtol=1e-2)


def batched_calls(compiled):
    """The LAPACK calls of a compiled program that factorize several matrices, and all of them."""
    calls = re.findall(r'\n.*custom_call_target="(?:lapack|blas)_.*', compiled.as_text())
    several = []
    for call in calls:
        shapes = re.findall(r"\b[fsuc]\d+\[([\d,]*)\]", call.split("metadata=")[0])
        sizes = [[int(size) for size in shape.split(",")] for shape in shapes if shape]
        if any(math.prod(size[:-2]) > 1 for size in sizes):
            several.append(call.strip())
    return several, calls


def assert_unbatched(function, *arguments):
    several, calls = batched_calls(jax.jit(function).lower(*arguments).compile())
    assert calls, "no LAPACK call at all: the test looks at nothing"
    assert not several


def test_the_walk_over_compiled_programs_sees_batched_calls():
    for function in (jnp.linalg.cholesky, jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.qr):
        several, calls = batched_calls(jax.jit(function).lower(squares((3,))).compile())
        assert several == [call.strip() for call in calls] != []


TARGETS = [(".*", lro.Target(4, reduction_axis=1, output_axis=2))]
galore = functools.partial(lro.galore_adamw, 1e-2, 4, 2, targets=TARGETS)
OPTIMIZERS = {
    "lowrank_adamw": lambda: lro.lowrank_adamw(1e-2, 4, 2, targets=TARGETS),
    "galore_adamw, subspace": lambda: galore(method="subspace"),
    "galore_adamw, svd": lambda: galore(method="svd"),
    "galore_adamw, gram": lambda: galore(method="gram"),
    "galore_adamw, random": lambda: galore(method="random"),
    "logra_adamw": lambda: lro.logra_adamw(1e-2, 4, targets=TARGETS),
    "ldadamw": lambda: lro.ldadamw(1e-2, 4, targets=TARGETS),
    "fira_adamw": lambda: lro.fira_adamw(1e-2, 4, 2, targets=TARGETS),
}


def stacks(runs=()):
    """Two stacks, and how many training runs there are of them."""
    return {"up": normal(0, (*runs, 3, 8, 12)), "down": normal(1, (*runs, 3, 12, 8))}


@pytest.mark.parametrize("runs", [(), (2,)], ids=["one run", "vmap over runs"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_batched_lapack_call_on_cpu_which_hangs_jaxlib_0_10(name, runs):
    """Of two at once neither returns on two cores; tests/endurance.py waits for that."""
    tx, params = relaxed(OPTIMIZERS[name]()), stacks(runs)
    init, update = (jax.vmap(tx.init), jax.vmap(tx.update)) if runs else (tx.init, tx.update)
    assert_unbatched(update, params, jax.eval_shape(init, params), params)


@pytest.mark.parametrize("runs", [(), (2,)], ids=["one run", "vmap over runs"])
def test_no_batched_lapack_call_in_a_refresh_of_the_backward_pass(runs):
    tx, params = relaxed(OPTIMIZERS["galore_adamw, subspace"]()), stacks(runs)

    def loss(params, x):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))

    def gradient(params, state, x):
        return lro.compact_value_and_grad(loss)(params, x, opt_state=state)

    init = jax.vmap(tx.init) if runs else tx.init
    gradient = jax.vmap(gradient) if runs else gradient
    assert_unbatched(gradient, params, jax.eval_shape(init, params), normal(2, (*runs, 5, 8)))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_keep_the_batched_form(platform):
    """A program that is compiled on a CPU for another platform has no loop over matrices."""
    x = squares((5,))
    exported = jax.export.export(jax.jit(factorize.inverse_factor), platforms=[platform])(x)
    assert "while" not in exported.mlir_module()
    assert "5x6x6" in exported.mlir_module()
    here = jax.export.export(jax.jit(factorize.inverse_factor), platforms=["cpu"])(x)
    assert "while" in here.mlir_module()
