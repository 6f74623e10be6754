"""Collectives out of the text of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lowrank_optax._memory.hlo import bytes_by_kind, collectives

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def compiled(fn, *arguments):
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))
        for shape, spec in arguments
    ]
    jitted = jax.jit(fn, out_shardings=NamedSharding(MESH, P()))
    return jitted.lower(*args).compile().as_text()


def test_a_contraction_is_reduced():
    text = compiled(lambda x, y: x.T @ y, ((64, 24), P("x")), ((64, 16), P("x")))
    assert bytes_by_kind(collectives(text)) == {"all-reduce": 24 * 16 * 4}
    (found,) = collectives(text)
    assert (found.times, found.shape) == (1, (24, 16))


def test_a_gather():
    text = compiled(lambda x: x + 1, ((64, 24), P("x")))
    assert bytes_by_kind(collectives(text)) == {"all-gather": 64 * 24 * 4}


def test_loops_count():
    def loop(x, ws):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, ws)[0]

    text = compiled(loop, ((16, 24), P()), ((5, 24, 24), P(None, "x")))
    assert max(c.times for c in collectives(text)) == 5


def test_a_branch_counts_as_its_cheapest():
    def branch(x):
        return jax.lax.cond(jnp.sum(x) > 0, lambda: x.T @ x, lambda: jnp.zeros((24, 24)))

    text = compiled(branch, ((64, 24), P("x")))
    assert bytes_by_kind(collectives(text)).get("all-reduce", 0) <= 8
    costliest = bytes_by_kind(collectives(text, refreshing=True))
    assert costliest["all-reduce"] >= 24 * 24 * 4


TEXT = """
HloModule step

%fused (p: f32[8,4]) -> f32[64,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %g = f32[64,4]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (a: f32[8,4], b: bf16[16]) -> f32[64,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = bf16[16]{0} parameter(1)
  %r = f32[1,4]{1,0} reduce-scatter(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %q = ((f32[8,4]{1,0}), f32[1,4]{1,0}) reduce-scatter-start(%a), replica_groups=[1,8]<=[8]
  %s = (bf16[16]{0}, bf16[128]{0}, u32[], u32[]) all-gather-start(%b), replica_groups=[1,8]<=[8]
  %d = bf16[128]{0} all-gather-done(%s)
  %t = (f32[8,4]{1,0}, bf16[16]{0}) all-reduce(%a, %b), to_apply=%add
  ROOT %f = f32[64,4]{1,0} fusion(%a), kind=kCustom, calls=%fused
}
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("reduce-scatter", 128 + 128), ("all-gather", 256 + 1024), ("all-reduce", 128 + 32)],
)
def test_forms_of_the_text(kind, expected):
    assert bytes_by_kind(collectives(TEXT))[kind] == expected


LOOP = """
%condition (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = s32[] constant(1)
  %r = f32[8]{0} all-reduce(%x), to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body
}
"""


def test_the_length_of_a_loop_is_read_off_its_condition():
    (found,) = collectives(LOOP)
    assert (found.times, found.bytes) == (7, 32)
    said = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert collectives(said)[0].times == 3


def test_no_program():
    assert collectives("") == []
