"""Contractions in float32, on one device and on meshes of both kinds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract, on_replicated
from lowrank_optax._memory.hlo import collectives


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ab,ac->bc", [(8, 4), (8, 6)]),
        ("ab,bc->ac", [(8, 4), (4, 6)]),
        ("lab,lar->lrb", [(3, 8, 4), (3, 8, 2)]),
        ("dhk,hkr->dr", [(8, 4, 6), (4, 6, 2)]),
        ("ab->ba", [(8, 4)]),
    ],
)
def test_is_einsum(subscripts, shapes):
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    expected = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in arrays))
    np.testing.assert_allclose(contract(subscripts, *arrays), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_low_precision_operands_accumulate_in_float32(dtypes):
    """A sum of 4096 ones stops at 256 in bfloat16."""
    left, right = jnp.ones((4096, 2), dtypes[0]), jnp.ones((4096, 3), dtypes[1])
    result = contract("ab,ac->bc", left, right)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, 4096)
    # Products are exact too: 257 needs nine bits.
    left = jnp.asarray([[255.0, 2.0]], dtypes[0])
    np.testing.assert_array_equal(contract("ab,bc->ac", left, jnp.ones((2, 1), dtypes[1])), 257)


def test_wider_operands_stay_wide():
    with jax.enable_x64(True):
        left, right = jnp.ones((4, 2), jnp.float64), jnp.ones((4, 3), jnp.float32)
        assert contract("ab,ac->bc", left, right).dtype == jnp.float64


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


# (subscripts, specs of the operands, spec of the result on Explicit axes)
PLACEMENTS = [
    pytest.param("ab,ac->bc", [P("x", None), P("x", None)], P(None, None), id="contracted both"),
    pytest.param("ab,ac->bc", [P("x", None), P()], P(None, None), id="contracted left"),
    pytest.param("ab,ac->bc", [P(), P("x", None)], P(None, None), id="contracted right"),
    pytest.param("ab,ac->bc", [P("x", "y"), P()], P("y", None), id="fsdp and tp"),
    pytest.param("ab,ac->bc", [P("x", None), P("y", None)], P(None, None), id="differently"),
    pytest.param("ab,ac->bc", [P(("x", "y"), None), P()], P(None, None), id="two mesh axes"),
    pytest.param("ab,ac->bc", [P(None, "x"), P(None, "x")], P("x", None), id="same axis twice"),
    pytest.param("ab,ac->bc", [P(None, "x"), P("x", None)], P("x", None), id="crossed"),
    pytest.param("ab,bc->ac", [P("x", "y"), P()], P("x", None), id="plain product"),
    pytest.param("lab,lar->lrb", [P("x", "y", None), P()], P("x", None, None), id="batch"),
    pytest.param("lab,lar->lrb", [P("x"), P("y")], P("x", None, None), id="batch differently"),
    pytest.param("lab,lar->lrb", [P(None, "x"), P(None, "x")], P(None, None, None), id="in batch"),
    pytest.param("dhk,hkr->dr", [P("x", "y", None), P()], P("x", None), id="heads"),
    pytest.param("ab->ba", [P("x", "y")], P("y", "x"), id="transpose"),
]


def operands(subscripts):
    sizes = dict.fromkeys("abcdhklr", 8)
    inputs = subscripts.split("->")[0].split(",")
    return [normal(*(sizes[c] for c in labels), seed=i) for i, labels in enumerate(inputs)]


def padded(spec, ndim):
    return tuple(spec) + (None,) * (ndim - len(spec))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("subscripts", "specs", "expected"), PLACEMENTS)
def test_explicit_mesh(subscripts, specs, expected, compiled):
    arrays = operands(subscripts)
    reference = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in arrays))
    mesh = mesh_of(AxisType.Explicit)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]

    def product(*arrays):
        return contract(subscripts, *arrays, precision=REFRESH_PRECISION)

    with jax.set_mesh(mesh):
        result = (jax.jit(product) if compiled else product)(*placed)
    np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)
    # Sharded as its surviving labels were, so nothing of full size is replicated.
    assert padded(result.sharding.spec, result.ndim) == padded(expected, result.ndim)


@pytest.mark.parametrize(("subscripts", "specs", "expected"), PLACEMENTS)
def test_auto_mesh(subscripts, specs, expected):
    del expected  # the compiler's choice
    arrays = operands(subscripts)
    reference = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in arrays))
    mesh = mesh_of(AxisType.Auto)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        result = jax.jit(lambda *arrays: contract(subscripts, *arrays))(*placed)
    np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("explicit", ["x", "y"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("subscripts", "specs", "expected"), PLACEMENTS)
def test_mesh_of_both_kinds(subscripts, specs, expected, compiled, explicit):
    """Of the Explicit axes the result keeps what survives; the others are the compiler's."""
    arrays = operands(subscripts)
    reference = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in arrays))
    kinds = [AxisType.Explicit if name == explicit else AxisType.Auto for name in "xy"]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=tuple(kinds))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]

    def product(*arrays):
        return contract(subscripts, *arrays, precision=REFRESH_PRECISION)

    with jax.set_mesh(mesh):
        result = (jax.jit(product) if compiled else product)(*placed)
    np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_the_larger_operand_stays():
    """A thin matrix that lies elsewhere comes to a weight, not the weight to it."""
    mesh = mesh_of(AxisType.Explicit)
    weight = jax.device_put(normal(64, 128), NamedSharding(mesh, P("x", "y")))
    basis = jax.device_put(normal(64, 4), NamedSharding(mesh, P("y", None)))
    for pair, subscripts in (((weight, basis), "mn,mr->rn"), ((basis, weight), "mr,mn->rn")):
        with jax.set_mesh(mesh):
            jitted = jax.jit(lambda *arrays, subscripts=subscripts: contract(subscripts, *arrays))
            compiled = jitted.lower(*pair).compile()
        found = collectives(compiled.as_text())
        assert found
        assert max(math.prod(c.shape) for c in found) <= 128 * 4


def test_mesh_without_context():
    """Arrays know their mesh; no surrounding ``set_mesh`` is needed."""
    mesh = mesh_of(AxisType.Explicit)
    left = jax.device_put(normal(8, 8), NamedSharding(mesh, P("x", "y")))
    right = jax.device_put(normal(8, 8, seed=1), NamedSharding(mesh, P("x", None)))
    result = jax.jit(lambda a, b: contract("ab,ac->bc", a, b))(left, right)
    np.testing.assert_allclose(result, np.asarray(left).T @ np.asarray(right), rtol=1e-4, atol=1e-5)
    assert padded(result.sharding.spec, 2) == ("y", None)


def test_factorization_of_a_sharded_gram():
    """JAX refuses to factorize sharded operands; a small one is replicated first."""
    mesh = mesh_of(AxisType.Explicit)
    square = normal(8, 8)
    square = jax.device_put(square @ square.T + jnp.eye(8), NamedSharding(mesh, P("x", "y")))
    with jax.set_mesh(mesh):
        factor = jax.jit(lambda x: on_replicated(jnp.linalg.cholesky, x))(square)
    np.testing.assert_allclose(factor @ factor.T, square, rtol=1e-5, atol=1e-5)


def test_contracted_axis_is_all_reduced_not_gathered():
    """The one collective is the sum of the small result."""
    mesh = mesh_of(AxisType.Explicit)
    left = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    right = jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda a, b: contract("ab,ac->bc", a, b)).lower(left, right).compile()
    hlo = step.as_text()
    assert "all-reduce" in hlo
    assert "all-gather" not in hlo
