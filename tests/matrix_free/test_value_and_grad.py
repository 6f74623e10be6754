"""Compact gradients: the cores that the backward pass makes are those of the full gradient."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import lowrank_optax as lro
from lowrank_optax._arrays import tree
from tests.helpers.loops import relaxed

pytestmark = pytest.mark.newest

RANK = 3


def adamw(rank=RANK, metrics=False, **kwargs):
    inner = relaxed(optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))
    return lro.galore_project(inner, lro.refresh_basis(rank, **kwargs), metrics=metrics)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def stored_bases(state):
    """The bases of a state as the ``bases`` argument, with no refresh."""
    tracker = state.tracker_state
    bases = tracker.encoders()
    paths = [projection.path for projection in tracker.plan.projections]
    keep = dict.fromkeys(paths, jnp.zeros([], bool))
    return lro.CompactBases(dict(zip(paths, bases, strict=True)), keep)


def project(state, grads):
    """The cores of full gradients by path."""
    plan, bases = state.tracker_state.plan, stored_bases(state).bases
    full = tree.by_path(grads)
    leaves = {projection.path: projection for projection in plan.projections}
    return {path: leaves[path].view.project(full[path], bases[path]) for path in bases}


def assert_cores_match(
    loss_fn, params, *args, targets=None, side="smaller", matrix_free=True, tolerance=1e-5
):
    """Cores equal PᵀG, other leaves' gradients and the value are those of jax.value_and_grad."""
    tracker = lro.refresh_basis(RANK, targets=targets, side=side, method="random")
    state = lro.galore_project(optax.sgd(1.0), tracker).init(params)
    assert state.tracker_state.plan.projections
    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params, *args)

    @jax.jit
    def compact(params, state, *args):
        grad_fn = lro.compact_value_and_grad(loss_fn)
        return grad_fn(params, *args, opt_state=state, bases=stored_bases(state))

    got, compact_grads, _ = compact(params, state, *args)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    expected = project(state, grads)
    found = tree.by_path(compact_grads)
    for path, full in tree.by_path(grads).items():
        if path in expected:
            assert isinstance(found[path], lro.Compact)
            error = jnp.linalg.norm(found[path].core - expected[path])
            assert error <= tolerance * jnp.linalg.norm(expected[path]), path
            assert jnp.any(expected[path] != 0), path
        elif full is not None:
            np.testing.assert_allclose(found[path], full, rtol=2e-4, atol=1e-6)
    report = lro.compact_report(loss_fn, params, *args, opt_state=state)
    if matrix_free is not None:
        assert report.matrix_free == matrix_free, str(report)
    return report


X = normal(0, 4, 5, 8)
MATRIX = normal(1, 8, 6)
SQUARE = normal(2, 8, 8)


def total(y):
    # Not linear, so that the cotangent differs from entry to entry.
    return jnp.sum(jnp.sin(y))


def loop(step):
    return lambda p, x: total(jax.lax.scan(lambda c, _: (step(c, p), None), x, None, length=3)[0])


@jax.custom_jvp
def twice(x):
    return 2 * x


twice.defjvp(lambda primals, tangents: (twice(*primals), 2 * tangents[0]))


@jax.custom_vjp
def fused(x, w):
    return jnp.tanh(x @ w)


def _fused_fwd(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _fused_bwd(saved, g):
    x, w, y = saved
    g = g * (1 - y**2)
    return g @ w.T, jnp.einsum("...i,...j->ij", x, g)


fused.defvjp(_fused_fwd, _fused_bwd)


def flash_like(q, k, v):
    """An attention with a custom backward pass, as fused kernels have."""

    def plain(q, k, v):
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), axis=-1)
        return jnp.einsum("bts,bsd->btd", scores, v)

    @jax.custom_vjp
    def attend(q, k, v):
        return plain(q, k, v)

    attend.defvjp(lambda *qkv: (plain(*qkv), qkv), lambda qkv, g: jax.vjp(plain, *qkv)[1](g))
    return attend(q, k, v)


W = {"w": MATRIX}
S = {"w": SQUARE}
CONSTRUCTS = {
    "matmul": (lambda p, x: total(x @ p["w"]), W),
    "jit": (lambda p, x: total(jax.jit(lambda w: x @ w)(p["w"])), W),
    "nested_jit": (lambda p, x: total(jax.jit(jax.jit(lambda w, x: x @ w))(p["w"], x)), W),
    "transposed": (lambda p, x: total(jnp.einsum("bto,io->bti", x[..., :6], p["w"])), W),
    "transpose": (lambda p, x: total(x[..., :6] @ p["w"].T), W),
    "weight_on_the_left": (lambda p, x: total(jnp.einsum("io,bti->obt", p["w"], x)), W),
    "used_twice": (lambda p, x: total(jnp.tanh(x @ p["w"]) @ p["w"].T), W),
    "same_loop": (loop(lambda c, p: jnp.tanh(c @ p["w"])), S),
    "remat": (lambda p, x: total(jax.checkpoint(lambda w: jnp.tanh(x @ w))(p["w"])), W),
    "remat_policy": (
        lambda p, x: total(
            jax.checkpoint(
                lambda w: jnp.tanh(jnp.tanh(x @ w) @ w),
                policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            )(p["w"])
        ),
        S,
    ),
    "cond": (
        lambda p, x: total(
            jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: jnp.cos(x) @ w, p["w"])
        ),
        W,
    ),
    "switch": (
        lambda p, x: total(
            jax.lax.switch(1, [lambda w: x @ w, lambda w: jnp.cos(x) @ w, lambda w: x @ w], p["w"])
        ),
        W,
    ),
    "fori_loop": (
        lambda p, x: total(jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ p["w"]), x)),
        S,
    ),
    "vmap": (lambda p, x: total(jax.vmap(jax.vmap(lambda row: row @ p["w"]))(x)), W),
    "custom_jvp_around": (lambda p, x: total(twice(x @ p["w"])), W),
    "cast": (lambda p, x: total(x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32)), W),
    "flash_attention": (
        lambda p, x: total(flash_like(x @ p["w"], jnp.cos(x) @ p["w"], jnp.sin(x) @ p["w"])),
        W,
    ),
    "named_checkpoint": (
        lambda p, x: total(checkpoint_name(x @ p["w"], "product")),
        W,
    ),
    "reshaped": (lambda p, x: total(x.reshape(20, 8) @ p["w"].reshape(1, 8, 6)[0]), W),
    "stop_gradient_elsewhere": (
        lambda p, x: total(x @ p["w"]) + total(x @ jax.lax.stop_gradient(p["w"])),
        W,
    ),
}
# Exact by projection of the full cotangent.
FALLBACKS = {
    "custom_vjp_on_the_weight": (lambda p, x: total(fused(x, p["w"])), W),
    "custom_jvp_on_the_weight": (lambda p, x: total(x @ twice(p["w"])), W),
    "scaled": (lambda p, x: total(x @ (p["w"] * 0.5)), W),
    "sum_with_itself": (lambda p, x: total(x @ (p["w"] + p["w"])), W),
    "quadratic": (lambda p, x: total(x @ (p["w"] @ p["w"])), S),
    "carried": (
        lambda p, x: total(
            x @ jax.lax.scan(lambda c, _: (0.5 * c, None), p["w"], None, length=2)[0]
        ),
        W,
    ),
    "penalty": (lambda p, x: total(x @ p["w"]) + jnp.sum(p["w"] ** 2), W),
    "half_of_it": (lambda p, x: total(x @ p["w"][:, :3]), W),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("side", ["reduction", "output"])
def test_construct_is_matrix_free(name, side):
    loss_fn, params = CONSTRUCTS[name]
    assert_cores_match(
        loss_fn,
        params,
        X,
        targets=[("w", RANK)],
        side=side,
        matrix_free=None if name == "stop_gradient_elsewhere" else True,
        # There the full gradient is rounded to bfloat16 on its way; the core is not.
        tolerance=1e-2 if name == "cast" else 1e-5,
    )


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_is_exact(name):
    loss_fn, params = FALLBACKS[name]
    report = assert_cores_match(loss_fn, params, X, targets=[("w", RANK)], matrix_free=False)
    assert "full gradient, projected" in str(report)


def test_both_sides():
    assert_cores_match(lambda p, x: total(x @ p["w"]), W, X, targets=[("w", RANK)], side="both")


LEAVES = {
    "query": ((8, 2, 5), (0, (1, 2)), "btd,dhk->bthk"),
    "heads_first": ((2, 8, 5), (1, (0, 2)), "btd,hdk->bthk"),
    "fused_qkv": ((3, 2, 8, 4), (2, (0, 1, 3)), "btd,chdk->cbthk"),
    "experts_everywhere": ((3, 8, 6), (1, 2), "btd,edf->betf"),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("side", ["reduction", "output", "both"])
def test_einsum_kernels(name, side):
    shape, axes, subscripts = LEAVES[name]

    def loss_fn(p, x):
        return total(jnp.einsum(subscripts, x, p["w"]))

    targets = {"w": lro.Target(RANK, *axes)}
    assert_cores_match(loss_fn, {"w": normal(3, *shape)}, X, targets=targets, side=side)


@pytest.mark.parametrize("side", ["reduction", "output"])
def test_several_contracted_axes(side):
    params = {"w": normal(3, 2, 5, 7)}

    def loss_fn(p, x):
        return total(jnp.einsum("bthk,hkd->btd", x, p["w"]))

    targets = {"w": lro.Target(RANK, (0, 1), 2)}
    assert_cores_match(loss_fn, params, normal(4, 3, 4, 2, 5), targets=targets, side=side)


@pytest.mark.parametrize("side", ["reduction", "output"])
def test_experts_with_their_own_tokens(side):
    params = {"w": normal(3, 3, 8, 6)}

    def loss_fn(p, x):
        return total(jnp.einsum("etd,edf->etf", x, p["w"]))

    targets = {"w": lro.Target(RANK, 1, 2)}
    assert_cores_match(loss_fn, params, normal(4, 3, 7, 8), targets=targets, side=side)


def test_merged_axes():
    params = {"w": normal(3, 8, 2, 5)}

    def loss_fn(p, x):
        return total(x @ p["w"].reshape(8, 10))

    for side in ("reduction", "output"):
        assert_cores_match(
            loss_fn, params, X, targets={"w": lro.Target(RANK, 0, (1, 2))}, side=side
        )


def test_ragged_product_falls_back_to_the_exact_core():
    params = {"w": normal(3, 3, 8, 6)}
    sizes = jnp.array([2, 1, 2], jnp.int32)

    def loss_fn(p, x):
        return total(jax.lax.ragged_dot(x[0], p["w"], sizes))

    targets = {"w": lro.Target(RANK, 1, 2)}
    assert_cores_match(loss_fn, params, X, targets=targets, matrix_free=False)


STACK = {"w": normal(5, 3, 8, 8), "scale": normal(6, 3, 8)}
STACKED = {
    "scan": lambda p, x: total(
        jax.lax.scan(lambda c, w: (jnp.tanh(c * w["scale"]) @ w["w"], None), x, p)[0]
    ),
    "scan_with_remat": lambda p, x: total(
        jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c * w["scale"]) @ w["w"], None)), x, p)[
            0
        ]
    ),
    "reversed_scan": lambda p, x: total(
        jax.lax.scan(lambda c, w: (jnp.tanh(c) @ w["w"], None), x, p, reverse=True)[0]
    ),
    "unrolled": lambda p, x: total(
        functools.reduce(lambda c, i: jnp.tanh(c) @ p["w"][i], range(3), x)
    ),
    "traced_index": lambda p, x: total(
        jax.lax.fori_loop(
            0,
            3,
            lambda i, c: jnp.tanh(c) @ jax.lax.dynamic_index_in_dim(p["w"], i, keepdims=False),
            x,
        )
    ),
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("side", ["reduction", "output", "both"])
def test_stacks(name, side):
    targets = [("w", lro.Target(RANK, 1, 2))]
    assert_cores_match(STACKED[name], STACK, X, targets=targets, side=side)


def test_tied_embedding():
    params = {"embedding": normal(7, 20, 8)}
    ids = jnp.array([[1, 2, 3], [3, 19, 0]])

    def loss_fn(p, ids):
        hidden = jnp.tanh(jnp.take(p["embedding"], ids, axis=0))
        return total(hidden @ p["embedding"].T)

    assert_cores_match(loss_fn, params, ids, targets=[("embedding", RANK)])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(y, y)
        x = x + y
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x))), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(20, 8)(ids)
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(20, name="lm_head")(x)


IDS = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])


def test_linen_model():
    model = Linen()
    params = model.init(jax.random.key(0), IDS)

    def loss_fn(p, ids):
        return total(model.apply(p, ids))

    assert_cores_match(loss_fn, params, IDS)


def test_nnx_model_through_split_and_merge():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, rngs=rngs, decode=False)
            self.norm = nnx.RMSNorm(16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(self.norm(self.attention(jnp.tanh(self.up(x)))))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss_fn(p, x):
        return total(nnx.merge(graph, p)(x))

    assert_cores_match(loss_fn, params, X)


def test_equinox_model():
    model = eqx.nn.MLP(8, 6, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(p, x):
        return total(jax.vmap(eqx.combine(p, static))(x))

    assert_cores_match(loss_fn, params, X[0])


# Training ----------------------------------------------------------------------------------


def two_layer_loss(params, x):
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"]["kernel"] - x) ** 2)


TWO_LAYERS = {
    "up": {"kernel": 0.3 * normal(8, 8, 16), "bias": jnp.zeros(16)},
    "down": {"kernel": 0.3 * normal(9, 16, 8)},
}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"side": "both"},
        {"method": "random"},
        {"method": "frozen"},
        {"stagger": True, "side": "larger"},
    ],
    ids=lambda kwargs: "-".join(map(str, kwargs.values())) or "default",
)
def test_training_equals_the_full_path(kwargs):
    tx = optax.chain(
        # The norm of compact gradients is that of the cores, so this one must not clip.
        optax.clip_by_global_norm(1e6),
        lro.galore_project(
            relaxed(optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)),
            lro.refresh_basis(RANK, every=50, targets=[("kernel", RANK)], **kwargs),
            scale=0.5,
        ),
    )
    grad_fn = lro.compact_value_and_grad(two_layer_loss)

    @jax.jit
    def compact_step(params, state, x):
        value, grads, bases = grad_fn(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def full_step(params, state, x):
        value, grads = jax.value_and_grad(two_layer_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    compact, full = (TWO_LAYERS, tx.init(TWO_LAYERS)), (TWO_LAYERS, tx.init(TWO_LAYERS))
    first = None
    for step in range(200):
        x = normal(step, 32, 8)
        *compact, value = compact_step(*compact, x)
        *full, expected = full_step(*full, x)
        first = expected if first is None else first
        np.testing.assert_allclose(value, expected, rtol=2e-4)
    assert value < 0.9 * first
    compact_state, full_state = compact[1][1].tracker_state, full[1][1].tracker_state
    np.testing.assert_array_equal(compact_state.refreshes, full_state.refreshes)
    np.testing.assert_array_equal(compact_state.next_refresh, full_state.next_refresh)
    assert int(full_state.refreshes.max()) == (
        1 if kwargs.get("method") == "frozen" else 5 if kwargs.get("stagger") else 4
    )


def test_directional_derivatives_are_finite_differences():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), TWO_LAYERS)
        x = normal(1, 16, 8).astype(jnp.float64)
        tracker = lro.refresh_basis(
            RANK, method="random", targets=[("kernel", RANK)], dtype=jnp.float64
        )
        state = lro.galore_project(optax.sgd(1.0), tracker).init(params)
        grad_fn = lro.compact_value_and_grad(two_layer_loss)
        bases = stored_bases(state)
        _, grads, _ = grad_fn(params, x, opt_state=state, bases=bases)
        plan = state.tracker_state.plan
        for leaf in plan.projections:
            core = tree.by_path(grads)[leaf.path].core
            direction = normal(leaf.index, *core.shape).astype(jnp.float64)
            step = 1e-6 * leaf.view.lift(direction, bases.bases[leaf.path])
            moved = [
                two_layer_loss(tree.with_leaves(params, {leaf.path: w}), x)
                for w in (
                    tree.by_path(params)[leaf.path] + step,
                    tree.by_path(params)[leaf.path] - step,
                )
            ]
            slope = (moved[0] - moved[1]) / 2e-6
            np.testing.assert_allclose(jnp.vdot(core, direction), slope, rtol=1e-6)


def test_accumulated_cores_equal_the_core_of_one_batch():
    tx = adamw(targets=[("kernel", RANK)])
    state = tx.init(TWO_LAYERS)
    grad_fn = lro.compact_value_and_grad(two_layer_loss)
    batches = normal(3, 4, 8, 8)

    @jax.jit
    def accumulate(params, state, batches):
        _, _, bases = grad_fn(params, batches[0], opt_state=state)

        def body(total, batch):
            _, grads, _ = grad_fn(params, batch, opt_state=state, bases=bases)
            return jax.tree.map(jnp.add, total, grads), None

        shapes = jax.eval_shape(
            lambda: grad_fn(params, batches[0], opt_state=state, bases=bases)[1]
        )
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        summed, _ = jax.lax.scan(body, zeros, batches)
        whole = grad_fn(params, batches.reshape(32, 8), opt_state=state, bases=bases)[1]
        return jax.tree.map(lambda g: g / 4, summed), whole, bases

    mean, whole, bases = accumulate(TWO_LAYERS, state, batches)
    assert mean["up"]["kernel"].core.shape == (RANK, 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), mean, whole)
    updates, state = tx.update(mean, state, TWO_LAYERS, bases=bases)
    assert int(state.tracker_state.tracker_count) == 1
    assert updates["up"]["kernel"].shape == (8, 16)


def test_aux_keywords_and_argnums():
    def loss_fn(x, params, *, scale):
        y = scale * (x @ params["w"])
        return total(y), {"mean": y.mean(), "name": "products"}

    state = lro.galore_adamw(1e-2, rank=RANK).init(W)
    grad_fn = lro.compact_value_and_grad(loss_fn, argnums=1, has_aux=True)
    (value, aux), grads, _ = grad_fn(X, W, scale=2.0, opt_state=state)
    assert aux["name"] == "products"
    np.testing.assert_allclose(value, total(2 * X @ MATRIX), rtol=1e-5)
    np.testing.assert_allclose(aux["mean"], (2 * X @ MATRIX).mean(), rtol=1e-4, atol=1e-6)
    assert isinstance(grads["w"], lro.Compact)


@pytest.mark.parametrize("side", ["reduction", "output"])
def test_extra_directions(side):
    tx = lro.galore_adamw(1e-2, rank=RANK, side=side, method="random", targets=[("w", RANK)])
    state = tx.init(W)
    extra = normal(11, 8 if side == "reduction" else 6, 2)
    grad_fn = lro.compact_value_and_grad(lambda p, x: total(x @ p["w"]))
    _, grads, _ = grad_fn(W, X, opt_state=state, bases=stored_bases(state), extra={"w": extra})
    full = jax.grad(lambda p, x: total(x @ p["w"]))(W, X)["w"]
    expected = extra.T @ full if side == "reduction" else full @ extra
    np.testing.assert_allclose(grads["w"].extra, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(grads["w"].core, project(state, {"w": full})["w"], atol=1e-4)
    # A refresh does not see them.
    fresh = lro.galore_adamw(1e-2, rank=RANK, side=side, targets=[("w", RANK)]).init(W)
    _, _, with_extra = grad_fn(W, X, opt_state=fresh, extra={"w": extra})
    _, _, without = grad_fn(W, X, opt_state=fresh)
    for a, b in zip(jax.tree.leaves(with_extra), jax.tree.leaves(without), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_compact_norm_and_metrics():
    tx = adamw(metrics=True)
    state = tx.init(W)
    grad_fn = lro.compact_value_and_grad(lambda p, x: total(x @ p["w"]))
    _, grads, bases = grad_fn(W, X, opt_state=state)
    np.testing.assert_allclose(optax.tree.norm(grads), jnp.linalg.norm(grads["w"].core), rtol=1e-6)
    _, state = tx.update(grads, state, W, bases=bases)
    # What a core leaves out is not known, and is not guessed.
    assert np.isnan(lro.metrics(state).leaves["w"].energy)
    assert int(lro.metrics(state).refreshes["w"]) == 1


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 0.0])
def test_refresh_is_retried_after_a_useless_gradient(bad):
    tx = lro.galore_project(optax.sgd(1e-3), lro.refresh_basis(RANK, every=2))
    state = tx.init(W)
    grad_fn = jax.jit(
        lambda p, s, f: lro.compact_value_and_grad(lambda p: f * total(X @ p["w"]))(p, opt_state=s)
    )
    old = state.tracker_state
    _, grads, bases = grad_fn(W, state, jnp.float32(bad))
    _, state = tx.update(grads, state, W, bases=bases)
    kept = state.tracker_state
    assert int(kept.refreshes[0]) == 0
    for a, b in zip(
        jax.tree.leaves((old.reduction_basis, old.output_basis)),
        jax.tree.leaves((kept.reduction_basis, kept.output_basis)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    _, grads, bases = grad_fn(W, state, jnp.float32(1.0))
    _, state = tx.update(grads, state, W, bases=bases)
    assert int(state.tracker_state.refreshes[0]) == 1


def test_partition_with_two_ranks():
    def optimizer(rank):
        return lro.galore_project(optax.sgd(1e-2), lro.refresh_basis(rank))

    tx = optax.partition(
        {"a": optimizer(2), "b": optimizer(3)},
        {"up": {"kernel": "a", "bias": "a"}, "down": {"kernel": "b"}},
    )
    state = tx.init(TWO_LAYERS)
    grad_fn = lro.compact_value_and_grad(two_layer_loss)
    _, grads, bases = grad_fn(TWO_LAYERS, normal(0, 4, 8), opt_state=state)
    assert grads["up"]["kernel"].core.shape == (2, 16)
    assert grads["down"]["kernel"].core.shape == (16, 3)
    updates, _ = tx.update(grads, state, TWO_LAYERS, bases=bases)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, TWO_LAYERS)


# What the compiler sees --------------------------------------------------------------------


def test_no_full_gradient_in_the_compiled_step():
    rows, columns, rank = 48, 80, 4
    params = {"w": normal(0, rows, columns)}
    tx = adamw(rank, method="random")
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(lambda p, x: total(x @ p["w"]))

    def compact_step(params, state, x):
        _, grads, bases = grad_fn(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return optax.apply_updates(params, updates), state

    def full_step(params, state, x):
        grads = jax.grad(lambda p, x: total(x @ p["w"]))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def products_of_full_size(step):
        text = jax.jit(step).lower(params, state, normal(1, 32, rows)).as_text()
        contracted = []
        for line in text.splitlines():
            shape = re.search(r"stablehlo\.dot_general.*-> tensor<(\d+)x(\d+)xf32>", line)
            if not shape or sorted(map(int, shape.groups())) != [rows, columns]:
                continue
            left = re.search(r": \(tensor<([\dx]+)xf32>, tensor<([\dx]+)xf32>\)", line)
            numbers = [*left.group(1).split("x"), *left.group(2).split("x")]
            contracted.extend({int(n) for n in numbers} - {rows, columns})
        return contracted

    # The lift contracts over the rank; the full gradient would contract over the tokens.
    assert products_of_full_size(compact_step) == [rank]
    assert 32 in products_of_full_size(full_step)


def test_data_parallel_reduces_cores_only():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns, rank = 48, 80, 4
    params = {"w": normal(0, rows, columns)}
    tx = adamw(rank, method="random")
    state = tx.init(params)
    grad_fn = lro.compact_value_and_grad(lambda p, x: total(x @ p["w"]))

    def step(params, state, x):
        _, grads, bases = grad_fn(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params, bases=bases)
        return optax.apply_updates(params, updates), state

    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    compiled = (
        jax.jit(step, in_shardings=(replicated, replicated, batch), out_shardings=replicated)
        .lower(params, state, normal(1, 32, rows))
        .compile()
    )
    reduced = re.findall(r"= \(?f32\[([\d,]*)\][^=]*all-reduce\(", compiled.as_text())
    assert reduced
    sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in reduced]
    assert max(sizes) <= rank * columns


# Errors ------------------------------------------------------------------------------------


def call(state, params=W, loss_fn=lambda p: total(X @ p["w"]), **kwargs):
    return lro.compact_value_and_grad(loss_fn)(params, opt_state=state, **kwargs)


def test_error_without_a_subspace_optimizer():
    with pytest.raises(ValueError, match=r"holds no subspace optimizer.*use jax.value_and_grad"):
        call(optax.adamw(1e-3).init(W))


def test_error_for_multi_steps_around():
    tx = optax.MultiSteps(lro.galore_adamw(1e-2, rank=RANK), 2)
    with pytest.raises(ValueError, match=r"MultiSteps.*galore_project\(optax.MultiSteps"):
        call(tx.init(W))


@pytest.mark.parametrize("method", ["svd", "gram"])
def test_error_for_methods_that_need_the_gradient(method):
    state = lro.galore_adamw(1e-2, rank=RANK, method=method).init(W)
    with pytest.raises(ValueError, match=rf"method='{method}'\) needs the full gradient"):
        call(state)


def test_error_for_a_stale_state():
    state = lro.galore_adamw(1e-2, rank=RANK).init(W)
    with pytest.raises(ValueError, match=r"'w' has shape \(8, 7\), but opt_state was made for"):
        call(state, {"w": jnp.ones((8, 7))})
    with pytest.raises(ValueError, match="projects 'w', which params do not have"):
        call(state, {"v": MATRIX}, lambda p: total(X @ p["v"]))


def test_error_for_a_loss_that_is_no_scalar():
    state = lro.galore_adamw(1e-2, rank=RANK).init(W)
    with pytest.raises(TypeError, match=r"must be a scalar, got shape \(4, 5, 6\)"):
        call(state, loss_fn=lambda p: X @ p["w"])


def test_error_for_bad_extra_directions():
    state = lro.galore_adamw(1e-2, rank=RANK).init(W)
    with pytest.raises(ValueError, match="'v' is no target; targets are 'w'"):
        call(state, extra={"v": jnp.ones((6, 2))})
    with pytest.raises(ValueError, match=r"'w' got shape \(5, 2\), expected \(6, 2\)"):
        call(state, extra={"w": jnp.ones((5, 2))})


def test_error_for_update_without_bases():
    tx = lro.galore_adamw(1e-2, rank=RANK)
    state = tx.init(W)
    _, grads, _ = call(state)
    with pytest.raises(ValueError, match=r"'w': this gradient is compact.*bases=bases"):
        tx.update(grads, state, W)


def test_error_for_a_lift_that_needs_the_gradient():
    lift = lro.subspace_lift()._replace(name="greedy_lift", needs_gradient=True)
    tx = lro.galore_project(optax.sgd(1e-2), lro.refresh_basis(RANK), lift=lift)
    state = tx.init(W)
    _, grads, bases = call(state)
    with pytest.raises(ValueError, match="'w': greedy_lift needs the full gradient, got a compact"):
        tx.update(grads, state, W, bases=bases)


def test_error_for_cores_of_another_rank():
    state = lro.galore_adamw(1e-2, rank=RANK).init(W)
    _, grads, bases = call(state)
    other = lro.galore_adamw(1e-2, rank=2)
    with pytest.raises(ValueError, match="compute gradients with the opt_state that you update"):
        other.update(grads, other.init(W), W, bases=bases)
