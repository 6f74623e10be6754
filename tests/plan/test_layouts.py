"""What the default rule reads off real models: which leaves are matrices, and how."""

import re
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lowrank_optax as lro
from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._plan.layouts import Kind, layouts
from lowrank_optax._plan.make_plan import make_plan

L, D, H, K, F, V, T = 3, 16, 4, 8, 40, 96, 2  # layers, d, heads, head_dim, hidden, vocabulary
E = 5  # experts


def read(shapes):
    """``{path: (reduction, output)}`` for matrices, the kind's name for all else."""
    found = layouts(list(shapes), list(shapes.values()))
    return {
        path: (layout.view.reduction_axes, layout.view.output_axes)
        if layout.kind is Kind.MATRIX
        else layout.kind.value
        for path, layout in zip(shapes, found, strict=True)
    }


def shapes_of(params):
    paths, leaves, _ = tree.flatten_with_paths(params)
    return {
        path: tuple(unbox(leaf).shape)
        for path, leaf in zip(paths, leaves, strict=True)
        if leaf is not None
    }


def check_ranks(grads, tokens):
    """The gradient of a linear layer has the rank of its inputs: if the view is right."""
    paths, leaves, _ = tree.flatten_with_paths(grads)
    arrays = {
        path: np.asarray(unbox(leaf), np.float64)
        for path, leaf in zip(paths, leaves, strict=True)
        if leaf is not None
    }
    found = layouts(list(arrays), [g.shape for g in arrays.values()])
    checked = []
    for (path, gradient), layout in zip(arrays.items(), found, strict=True):
        if layout.kind is not Kind.MATRIX:
            continue
        view = layout.view
        order = view.batch_axes + view.reduction_axes + view.output_axes
        matrices = gradient.transpose(order).reshape(-1, view.rows, view.columns)
        values = np.linalg.svd(matrices, compute_uv=False)
        assert values.shape[-1] > tokens, path
        assert (values[..., 0] > 0).all(), path
        assert (values[..., tokens] < 1e-4 * values[..., 0]).all(), path
        checked.append(path)
    return checked


IN, OUT, PLAIN = ((0,), (1, 2)), ((0, 1), (2,)), ((0,), (1,))
IN_1, OUT_1, PLAIN_1 = ((1,), (2, 3)), ((1, 2), (3,)), ((1,), (2,))


# Real models ---------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(H, qkv_features=H * K, name="attention")(y)
        y = nn.RMSNorm(name="mlp_norm")(x)
        return x + nn.Dense(D, name="down")(jax.nn.gelu(nn.Dense(F, name="up")(y))), None


class LinenModel(nn.Module):
    scanned: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(V, D, name="embed")(tokens)
        positions = self.param("pos_embedding", nn.initializers.normal(0.1), (1, T, D))
        x = x + positions + self.param("cls", nn.initializers.normal(0.1), (1, 1, D))
        if self.scanned:
            stack = nn.scan(LinenBlock, {"params": 0}, split_rngs={"params": True}, length=L)
            x, _ = stack(name="layers")(x, None)
        else:
            for i in range(L):
                x, _ = LinenBlock(name=f"layers_{i}")(x)
        x = nn.LayerNorm(name="final_norm")(x)
        return nn.Dense(V, name="lm_head")(x)


LINEN_BLOCK = {
    "LayerNorm_0/bias": "vector",
    "LayerNorm_0/scale": "vector",
    "attention/key/bias": "vector",
    "attention/key/kernel": IN,
    "attention/out/bias": "vector",
    "attention/out/kernel": OUT,
    "attention/query/bias": "vector",
    "attention/query/kernel": IN,
    "attention/value/bias": "vector",
    "attention/value/kernel": IN,
    "down/bias": "vector",
    "down/kernel": PLAIN,
    "mlp_norm/scale": "vector",
    "up/bias": "vector",
    "up/kernel": PLAIN,
}
LINEN_REST = {
    "params/cls": "vector",
    "params/embed/embedding": "embedding",
    "params/final_norm/bias": "vector",
    "params/final_norm/scale": "vector",
    "params/lm_head/bias": "vector",
    "params/lm_head/kernel": "head",
    "params/pos_embedding": "embedding",
}


def stacked(expected):
    """The same layouts behind one stacking axis."""
    return {
        path: entry
        if isinstance(entry, str)
        else tuple(tuple(axis + 1 for axis in axes) for axes in entry)
        for path, entry in expected.items()
    }


@pytest.mark.parametrize("scanned", [True, False])
def test_linen_model(scanned):
    model = LinenModel(scanned)
    tokens = jnp.asarray([[1, 2]])
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    expected = dict(LINEN_REST)
    if scanned:
        expected |= {f"params/layers/{k}": v for k, v in stacked(LINEN_BLOCK).items()}
    else:
        expected |= {f"params/layers_{i}/{k}": v for i in range(L) for k, v in LINEN_BLOCK.items()}
    assert read(shapes_of(params)) == expected
    if not scanned:
        return

    @jax.jit
    def gradient(key):
        params = model.init(key, tokens)
        return jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, tokens) * 3)))(params)

    checked = check_ranks(gradient(jax.random.key(0)), tokens=T)
    assert len(checked) == sum(not isinstance(entry, str) for entry in expected.values())


def test_linen_conv_is_left_with_the_line_that_projects_it():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(24)(nn.Conv(32, (3, 3))(x).reshape(1, -1))

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4, 4, 16)))
    path = "params/Conv_0/kernel"
    assert read(shapes_of(params))[path] == "unknown"
    with pytest.warns(UserWarning, match=path) as caught:
        plan = make_plan(params, None, 4, "smaller")
    assert [leaf.path for leaf in plan.leaves if leaf.is_target] == ["params/Dense_0/kernel"]
    assert len(caught) == 1
    # The lists in the message, their dots filled in, do what they say.
    projecting, silencing = re.findall(r"targets=(\[.*?default\(\)\])", str(caught[0].message))
    line = projecting.replace("rank", "4", 1)
    line = line.replace("reduction_axis=...", "reduction_axis=(0, 1, 2)")
    line = line.replace("output_axis=...", "output_axis=3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projected = make_plan(params, eval(line, {"lro": lro}), 8, "smaller")
        silenced = make_plan(params, eval(silencing, {"lro": lro}), 8, "smaller")
    leaves = {leaf.path: leaf for leaf in projected.leaves if leaf.is_target}
    assert set(leaves) == {path, "params/Dense_0/kernel"}
    assert (leaves[path].rank, leaves[path].sides) == (4, ("output",))
    assert leaves["params/Dense_0/kernel"].rank == 8
    assert [leaf.path for leaf in silenced.leaves if leaf.is_target] == ["params/Dense_0/kernel"]


@pytest.mark.parametrize(
    "shape", [(3, 3, D, F), (3, D, F), (7, 7, 1, 32)], ids=["2d", "1d", "depthwise"]
)
@pytest.mark.parametrize("path", ["Conv_0/kernel", "blocks/conv1/kernel", "moe/ConvTranspose_0/w"])
def test_convolutions_are_unknown(path, shape):
    assert read({path: shape}) == {path: "unknown"}


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            H, D, qkv_features=H * K, decode=False, normalize_qk=True, rngs=rngs
        )
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(x)))


class NNXModel(nnx.Module):
    def __init__(self, rngs, vmapped):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.vmapped = vmapped
        if vmapped:
            make = nnx.vmap(NNXBlock, in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(L))
        else:
            self.blocks = nnx.List([NNXBlock(rngs) for _ in range(L)])
        self.final_norm = nnx.RMSNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.vmapped:

            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(block, x):
                return block(x)

            x = run(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.final_norm(x))


NNX_BLOCK = {
    "attention/key/bias": "vector",
    "attention/key/kernel": IN,
    "attention/key_ln/scale": "vector",
    "attention/out/bias": "vector",
    "attention/out/kernel": OUT,
    "attention/query/bias": "vector",
    "attention/query/kernel": IN,
    "attention/query_ln/scale": "vector",
    "attention/value/bias": "vector",
    "attention/value/kernel": IN,
    "down/kernel": PLAIN,
    "norm/bias": "vector",
    "norm/scale": "vector",
    "up/bias": "vector",
    "up/kernel": PLAIN,
}


@pytest.mark.parametrize("vmapped", [True, False])
def test_nnx_model(vmapped):
    model = nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0), vmapped))
    params = nnx.state(model, nnx.Param)
    expected = {
        "embed/embedding": "embedding",
        "final_norm/scale": "vector",
        "head/bias": "vector",
        "head/kernel": "head",
    }
    if vmapped:
        expected |= {f"blocks/{k}": v for k, v in stacked(NNX_BLOCK).items()}
    else:
        expected |= {f"blocks/{i}/{k}": v for i in range(L) for k, v in NNX_BLOCK.items()}
    assert read(shapes_of(params)) == expected
    # Boxed variables, the plain dict and the module itself have the same names.
    assert read(shapes_of(nnx.to_pure_dict(params))) == expected
    if not vmapped:
        return

    @nnx.jit
    def gradient(key):
        model = NNXModel(nnx.Rngs(key), vmapped)
        tokens = jnp.asarray([[1, 2]])
        return nnx.grad(lambda model: jnp.sum(jnp.sin(model(tokens) * 3)))(model)

    checked = check_ranks(gradient(jax.random.key(0)), tokens=T)
    assert len(checked) == sum(not isinstance(entry, str) for entry in expected.values())


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(
            H, D, qk_size=K, vo_size=K, use_query_bias=True, key=key
        )
        self.mlp = eqx.nn.MLP(D, D, F, 1, key=key)
        self.norm = eqx.nn.LayerNorm(D)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


class EquinoxModel(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list | EquinoxBlock
    head: eqx.nn.Linear

    def __init__(self, stack, key):
        keys = jax.random.split(key, L)
        self.embedding = eqx.nn.Embedding(V, D, key=keys[0])
        self.blocks = (
            eqx.filter_vmap(EquinoxBlock)(keys) if stack else [EquinoxBlock(key) for key in keys]
        )
        self.head = eqx.nn.Linear(D, V, use_bias=False, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        if isinstance(self.blocks, list):
            for block in self.blocks:
                x = block(x)
        else:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), x, arrays)
        return jax.vmap(self.head)(x)


TRANSPOSED = ((1,), (0,))  # PyTorch's convention, (output, input)
EQUINOX_BLOCK = {
    "attention/query_proj/weight": TRANSPOSED,
    "attention/query_proj/bias": "vector",
    "attention/key_proj/weight": TRANSPOSED,
    "attention/value_proj/weight": TRANSPOSED,
    "attention/output_proj/weight": TRANSPOSED,
    "mlp/layers/0/weight": TRANSPOSED,
    "mlp/layers/0/bias": "vector",
    "mlp/layers/1/weight": TRANSPOSED,
    "mlp/layers/1/bias": "vector",
    "norm/weight": "vector",
    "norm/bias": "vector",
}


@pytest.mark.parametrize("stack", [True, False])
def test_equinox_model(stack):
    key = jax.random.key(0)
    model = eqx.filter_eval_shape(EquinoxModel, stack, key)
    params = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    expected = {"embedding/weight": "embedding", "head/weight": "head"}
    if stack:
        expected |= {f"blocks/{k}": v for k, v in stacked(EQUINOX_BLOCK).items()}
    else:
        expected |= {f"blocks/{i}/{k}": v for i in range(L) for k, v in EQUINOX_BLOCK.items()}
    assert read(shapes_of(params)) == expected
    # The None leaves of its static fields are no obstacle, and the head's d side is known.
    plan = make_plan(params, [("head", 4), (".", None)], 4, "smaller")
    (leaf,) = [leaf for leaf in plan.leaves if leaf.is_target]
    assert (leaf.view.rows, leaf.view.columns, leaf.sides) == (D, V, ("reduction",))
    if not stack:
        return

    @jax.jit
    def gradient(key):
        params, static = eqx.partition(EquinoxModel(stack, key), eqx.is_inexact_array)
        tokens = jnp.asarray([1, 2])
        return jax.grad(lambda p: jnp.sum(jnp.sin(eqx.combine(p, static)(tokens) * 3)))(params)

    checked = check_ranks(gradient(key), tokens=T)
    assert len(checked) == sum(not isinstance(entry, str) for entry in expected.values())


def test_equinox_mlp_alone():
    model = eqx.filter_eval_shape(eqx.nn.MLP, D, 24, F, 2, key=jax.random.key(0))
    found = read(shapes_of(eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))))
    assert {path: e for path, e in found.items() if e != "vector"} == {
        f"layers/{i}/weight": TRANSPOSED for i in range(3)
    }


def test_equinox_stacked_mlp_is_left():
    """Nothing tells (copies, out, in) of a lone vmapped MLP from three axes of another kind."""
    assert read({"layers/0/weight": (L, F, D), "layers/0/bias": (L, F)}) == {
        "layers/0/weight": "unknown",
        "layers/0/bias": "vector",
    }


# Names and shapes of libraries that are not installed here ----------------------------------------


def test_tunix_einsum_names():
    layer = {
        "attn/q_einsum/w": ((H, D, K), ((1,), (0, 2))),
        "attn/kv_einsum/w": ((2, 1, D, K), ((2,), (0, 1, 3))),
        "attn/attn_vec_einsum/w": ((H, K, D), OUT),
        "attn/_query_norm/scale": ((K,), "vector"),
        "mlp/gate_proj/kernel": ((D, F), PLAIN),
        "mlp/up_proj/kernel": ((D, F), PLAIN),
        "mlp/down_proj/kernel": ((F, D), PLAIN),
        "pre_attention_norm/scale": ((D,), "vector"),
    }
    expected = {"embedder/input_embedding": ((V, D), "embedding")}
    expected |= {f"layers/{i}/{path}": entry for i in range(L) for path, entry in layer.items()}
    expected["final_norm/scale"] = ((D,), "vector")
    assert read({p: shape for p, (shape, _) in expected.items()}) == {
        p: entry for p, (_, entry) in expected.items()
    }


def test_tunix_projection_names_and_experts():
    expected = {
        "embedder/input_embedding": ((V, D), "embedding"),
        "layers/0/attn/q_proj/w": ((D, H, K), IN),
        "layers/0/attn/k_proj/w": ((D, 2, K), IN),
        "layers/0/attn/v_proj/w": ((D, 2, K), IN),
        "layers/0/attn/o_proj/w": ((H, K, D), OUT),
        "layers/0/attn/q_norm/w": ((K,), "vector"),
        "layers/0/input_layernorm/w": ((D,), "vector"),
        "layers/0/mlp/gate_proj": ((E, D, F), PLAIN_1),
        "layers/0/mlp/up_proj": ((E, D, F), PLAIN_1),
        "layers/0/mlp/down_proj": ((E, F, D), PLAIN_1),
        "layers/0/mlp/router/kernel": ((D, E), PLAIN),
        "lm_head/w": ((D, V), "head"),
    }
    assert read({p: shape for p, (shape, _) in expected.items()}) == {
        p: entry for p, (_, entry) in expected.items()
    }


MAXTEXT = {
    "params/decoder/decoder_norm/scale": ((D,), "vector"),
    "params/decoder/layers/mlp/wi_0/kernel": ((D, L, F), ((0,), (2,))),
    "params/decoder/layers/mlp/wi_1/kernel": ((D, L, F), ((0,), (2,))),
    "params/decoder/layers/mlp/wo/kernel": ((F, L, D), ((0,), (2,))),
    "params/decoder/layers/pre_self_attention_layer_norm/scale": ((D, L), "vector"),
    "params/decoder/layers/self_attention/key/kernel": ((D, L, 2, K), ((0,), (2, 3))),
    "params/decoder/layers/self_attention/out/kernel": ((H, L, K, D), ((0, 2), (3,))),
    "params/decoder/layers/self_attention/query/kernel": ((D, L, H, K), ((0,), (2, 3))),
    "params/decoder/layers/self_attention/value/kernel": ((D, L, 2, K), ((0,), (2, 3))),
    "params/decoder/logits_dense/kernel": ((D, V), "head"),
    "params/token_embedder/embedding": ((V, D), "embedding"),
}


def test_maxtext_names_stacked_at_axis_one():
    assert read({p: shape for p, (shape, _) in MAXTEXT.items()}) == {
        p: entry for p, (_, entry) in MAXTEXT.items()
    }


def test_maxtext_names_unscanned():
    shapes = {}
    for path, (shape, _) in MAXTEXT.items():
        if "/layers/" in path:
            for i in range(L):
                shapes[path.replace("layers", f"layers_{i}")] = shape[:1] + shape[2:]
        else:
            shapes[path] = shape
    found = read(shapes)
    prefix = "params/decoder/layers_1/"
    assert found[prefix + "self_attention/query/kernel"] == IN
    assert found[prefix + "self_attention/out/kernel"] == OUT
    assert found[prefix + "mlp/wo/kernel"] == PLAIN
    assert found[prefix + "pre_self_attention_layer_norm/scale"] == "vector"
    assert found["params/decoder/logits_dense/kernel"] == "head"


def test_maxtext_experts_stacked_at_axis_one():
    layers = "decoder/moe_layers"
    expected = {
        f"{layers}/MoeBlock_0/gate/kernel": ((D, L, E), ((0,), (2,))),
        f"{layers}/MoeBlock_0/wi_0": ((E, L, D, F), ((2,), (3,))),
        f"{layers}/MoeBlock_0/wo": ((E, L, F, D), ((2,), (3,))),
        f"{layers}/pre_self_attention_layer_norm/scale": ((D, L), "vector"),
        # The experts' container does not make experts of its attention.
        f"{layers}/self_attention/query/kernel": ((D, L, H, K), ((0,), (2, 3))),
        f"{layers}/self_attention/out/kernel": ((H, L, K, D), ((0, 2), (3,))),
    }
    assert read({p: shape for p, (shape, _) in expected.items()}) == {
        p: entry for p, (_, entry) in expected.items()
    }


@pytest.mark.parametrize("lead", [(), (L,)], ids=["one layer", "stacked"])
def test_experts(lead):
    shapes = {"moe/wi": (*lead, E, D, F), "moe/wo": (*lead, E, F, D), "moe/b1": (*lead, E, F)}
    last = (len(lead) + 1,), (len(lead) + 2,)
    assert read(shapes) == {"moe/wi": last, "moe/wo": last, "moe/b1": "vector"}


def test_experts_in_other_axis_orders_are_left():
    # A reading as (d; E, f) or (E, d; 2, f) would be wrong.
    assert read({"moe/wi": (D, E, F)}) == {"moe/wi": "unknown"}
    assert read({"experts/gate_up": (E, D, 2, F)}) == {"experts/gate_up": "unknown"}


def test_wo_of_attention_and_wo_of_experts():
    shapes = {
        "block/attention/wq": (D, H, K),
        "block/attention/wo": (H, K, D),
        "block/moe/wi": (E, D, F),
        "block/moe/wo": (E, F, D),
    }
    found = read(shapes)
    assert found["block/attention/wo"] == OUT
    assert found["block/moe/wo"] == PLAIN_1


def test_wo_without_company_is_left():
    """(h, head_dim, d), (E, f, d) and (L, f, d) look the same."""
    assert read({"mlp/wi": (L, D, F), "mlp/wo": (L, F, D)})["mlp/wo"] == "unknown"
    assert read({"attention/wo": (H, K, D)}) == {"attention/wo": "unknown"}


@pytest.mark.parametrize("kernel", ["kernel", "w"])
def test_hf_names_stacked(kernel):
    layers = "model/layers"
    expected = {
        "model/embed_tokens/embedding": ((V, D), "embedding"),
        f"{layers}/input_layernorm/scale": ((L, D), "vector"),
        f"{layers}/mlp/down_proj/{kernel}": ((L, F, D), PLAIN_1),
        f"{layers}/mlp/gate_proj/{kernel}": ((L, D, F), PLAIN_1),
        f"{layers}/post_attention_layernorm/weight": ((L, D), "vector"),
        f"{layers}/self_attn/o_proj/{kernel}": ((L, H * K, D), PLAIN_1),
        f"{layers}/self_attn/q_proj/{kernel}": ((L, D, H * K), PLAIN_1),
        f"{layers}/self_attn/q_proj/bias": ((L, H * K), "vector"),
        "model/norm/weight": ((D,), "vector"),
        f"lm_head/{kernel}": ((D, V), "head"),
    }
    assert read({p: shape for p, (shape, _) in expected.items()}) == {
        p: entry for p, (_, entry) in expected.items()
    }


def test_stack_of_projections_without_norms_or_container():
    """Kernels of q and o tell a stack (L, d, D) from heads (d, h, hd) by each other."""
    names = ("wq", "wk", "wv", "wo")
    stack = {"wq": (L, D, 32), "wk": (L, D, K), "wv": (L, D, K), "wo": (L, 32, D)}
    square = dict.fromkeys(names, (L, D, D))
    heads = {"wq": (D, H, K), "wk": (D, 2, K), "wv": (D, 2, K), "wo": (H, K, D)}
    assert read(stack) == dict.fromkeys(names, PLAIN_1)
    assert read(square) == dict.fromkeys(names, PLAIN_1)
    assert read(heads) == {"wq": IN, "wk": IN, "wv": IN, "wo": OUT}
    # With d heads of d layers it could be both.
    toy = {"wq": (K, K, H), "wk": (K, K, H), "wv": (K, K, H), "wo": (K, H, K)}
    assert read(toy) == dict.fromkeys(names, "unknown")


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_heads_without_norms_or_container(axis):
    def insert(shape):
        return (*shape[:axis], L, *shape[axis:])

    shapes = {"a/query/kernel": insert((D, H, K)), "a/out/kernel": insert((H, K, D))}
    rest = [i for i in range(4) if i != axis]
    assert read(shapes) == {
        "a/query/kernel": ((rest[0],), (rest[1], rest[2])),
        "a/out/kernel": ((rest[0], rest[1]), (rest[2],)),
    }
    # A single kernel of four axes may be either.
    assert read({"a/query/kernel": insert((D, H, K))}) == {"a/query/kernel": "unknown"}


def test_query_alone():
    assert read({"decoder/q/kernel": (64, 4, 16)}) == {"decoder/q/kernel": IN}
    # As a stack (L, d, heads * head_dim) has a short first axis.
    assert read({"decoder/q/kernel": (3, 64, 64)}) == {"decoder/q/kernel": "unknown"}


def test_fused_qkv():
    shapes = {"attn/qkv_proj/kernel": (D, 3, H, K), "attn/out/kernel": (H, K, D)}
    assert read(shapes) == {"attn/qkv_proj/kernel": ((0,), (1, 2, 3)), "attn/out/kernel": OUT}
    leading = {"attn/qkv_proj/kernel": (3, D, H, K), "attn/out/kernel": (H, K, D)}
    assert read(leading)["attn/qkv_proj/kernel"] == "unknown"
    assert read({"attn/qkv/kernel": (3, 64, 64)}) == {"attn/qkv/kernel": "unknown"}


def test_heads_of_as_many_axes_as_head_dims_are_no_stack():
    """Eight heads of eight: the second axis of everything is 8, and yet no layer."""
    shapes = {
        "attn/query/kernel": (64, 8, 8),
        "attn/out/kernel": (8, 8, 64),
        "attn/q_norm/scale": (8, 8),
    }
    assert read(shapes) == {
        "attn/query/kernel": IN,
        "attn/out/kernel": OUT,
        "attn/q_norm/scale": "vector",
    }


def test_pipeline_of_stacks():
    shapes = {
        "stages/ln/scale": (2, L, D),
        "stages/q_proj/kernel": (2, L, D, H, K),
        "stages/o_proj/kernel": (2, L, H, K, D),
        "stages/mlp/kernel": (2, L, D, F),
    }
    assert read(shapes) == {
        "stages/ln/scale": "vector",
        "stages/q_proj/kernel": ((2,), (3, 4)),
        "stages/o_proj/kernel": ((2, 3), (4,)),
        "stages/mlp/kernel": ((2,), (3,)),
    }


def test_plain_jax():
    assert read({"w1": (64, 128), "b1": (128,)}) == {"w1": PLAIN, "b1": "vector"}
    params = [(jnp.ones((784, 512)), jnp.ones(512)), (jnp.ones((512, 10)), jnp.ones(10))]
    assert read(shapes_of(params)) == {
        "0/0": PLAIN,
        "0/1": "vector",
        "1/0": PLAIN,
        "1/1": "vector",
    }
    haiku = {
        "mlp/~/linear_0": {"w": jnp.ones((D, F)), "b": jnp.ones(F)},
        "layer_norm": {"scale": jnp.ones(D), "offset": jnp.ones(D)},
        "embed": {"embeddings": jnp.ones((V, D))},
    }
    assert read(shapes_of(haiku)) == {
        "embed/embeddings": "embedding",
        "layer_norm/offset": "vector",
        "layer_norm/scale": "vector",
        "mlp/~/linear_0/b": "vector",
        "mlp/~/linear_0/w": PLAIN,
    }
    assert read({}) == {}
    assert read({"": (D, F)}) == {"": PLAIN}  # a bare array


def test_list_of_layers_is_no_stack():
    shapes = {f"layers/{i}/q/kernel": (D, H, K) for i in range(D)}
    assert set(read(shapes).values()) == {IN}


def test_container_of_matrices_is_no_stack():
    assert read({"blocks/a/kernel": (D, F), "blocks/b/kernel": (D, F)}) == {
        "blocks/a/kernel": PLAIN,
        "blocks/b/kernel": PLAIN,
    }


def test_container_of_stacked_kernels():
    shapes = {"layers/fc/kernel": (L, D, F), "layers/fc/bias": (L, F)}
    assert read(shapes) == {"layers/fc/kernel": PLAIN_1, "layers/fc/bias": "vector"}


# Kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "Embed_0/embedding",
        "wte/weight",
        "wpe/embedding",
        "tok_emb/weight",
        "pos_emb",
        "position_embeddings/weight",
        "pos_embedding",
        "positional_encoding",
        "relative_attention_bias/embedding",
        "embeddings/word_embeddings/embedding",
        "shared/embedding",
    ],
)
def test_embeddings(path):
    assert read({path: (V, D)}) == {path: "embedding"}


@pytest.mark.parametrize(
    "path",
    [
        "lm_head/kernel",
        "params/head/kernel",
        "unembed/kernel",
        "decoder/logits_dense/kernel",
        "embed_out/kernel",
        "output/kernel",
        "params/output/kernel",
        "classifier/dense/kernel",
        "to_logits/w",
        "params/logitdense/kernel",
        "readout/kernel",
        "mlm_head/dense/kernel",
        "cls_head/kernel",
        "qa_outputs/kernel",
        "score/kernel",
        "head/dense/kernel",
    ],
)
def test_heads(path):
    (layout,) = layouts([path], [(D, V)])
    assert (layout.kind, layout.view.rows, layout.view.columns) == (Kind.HEAD, D, V)


@pytest.mark.parametrize("path", ["lm_head/weight", "unembed/embedding", "params/head/weight"])
def test_heads_stored_by_vocabulary(path):
    (layout,) = layouts([path], [(V, D)])
    assert (layout.kind, layout.view.rows, layout.view.columns) == (Kind.HEAD, D, V)


def test_vocabulary_tells_how_a_head_is_stored():
    """A kernel (V, d) would be read as d outputs by its name alone."""
    found = layouts(["embed/embedding", "lm_head/kernel"], [(V, D), (V, D)])
    assert (found[1].view.rows, found[1].view.columns) == (D, V)


def test_output_layers_of_blocks_are_no_heads():
    block = "bert/encoder/layer/0"
    shapes = {
        "bert/embeddings/word_embeddings/embedding": (V, D),
        f"{block}/attention/output/dense/kernel": (D, D),
        f"{block}/output/dense/kernel": (F, D),
        f"{block}/intermediate/dense/kernel": (D, F),
        f"{block}/attention/output/kernel": (D, V),  # a size that happens to agree
        "cls/predictions/transform/dense/kernel": (D, D),
        "cls/predictions/decoder/kernel": (D, V),
    }
    found = read(shapes)
    assert found.pop("bert/embeddings/word_embeddings/embedding") == "embedding"
    assert found.pop("cls/predictions/decoder/kernel") == "head"
    assert set(found.values()) == {PLAIN}


def test_output_layers_of_stacks_are_no_heads():
    shapes = {
        "embed/embedding": (V, D),
        "body/norm/scale": (L, D),
        "body/out/kernel": (L, V, D),  # as wide as the vocabulary
    }
    assert read(shapes)["body/out/kernel"] == PLAIN_1


def test_out_of_a_single_attention_is_no_head():
    shapes = {"query/kernel": (D, D), "output/kernel": (D, D), "out_proj/weight": (D, D)}
    assert read(shapes)["output/kernel"] == PLAIN


def test_hidden_layers_as_wide_as_the_vocabulary_are_no_heads():
    """A byte model of width 64 has 256 hidden units and a vocabulary of 256."""
    shapes = {"embed/embedding": (256, 64), "mlp/up/kernel": (64, 256), "mlp/out/kernel": (256, 64)}
    found = read(shapes)
    assert found["mlp/up/kernel"] == PLAIN
    assert found["mlp/out/kernel"] == PLAIN


BLOCKS = {
    f"{name}_{i}/{mlp}/kernel": shape
    for name in ("layers", "block")
    for i in range(2)
    for mlp, shape in (("up", (D, F)), ("down", (F, D)))
}


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("layers_7/kernel", (D, V)),
        ("layers/7/weight", (V, D)),
        ("params/Dense_0/kernel", (D, V)),
        ("mlp/~/linear_2/w", (D, V)),
        ("7/weight", (V, D)),
        ("Dense_0/kernel", (F, V)),  # which need not be of the embedding's width
    ],
)
def test_an_unnamed_last_layer_of_vocabulary_size_is_a_head(path, shape):
    embedding = {"embed/embedding": (V, D), "pos_embed/embedding": (T, D)}
    shapes = {**embedding, **BLOCKS, path: shape}
    paths = list(shapes)
    for layout, name in zip(layouts(paths, list(shapes.values())), paths, strict=True):
        assert (layout.kind is Kind.HEAD) == (name == path)
    assert (layout.view.rows, layout.view.columns) == (min(shape), V)


@pytest.mark.parametrize(
    ("why", "extra"),
    [
        ("no vocabulary", {"embed/embedding": (V + 1, D)}),
        ("positions are none", {"embed/embedding": (V + 1, D), "wpe/embedding": (V, D)}),
        ("another head", {"lm_head/kernel": (D, V)}),
        ("not the last", {"layers_8/kernel": (D, F)}),
        ("a hidden layer is as wide", {"layers_1/mlp/kernel": (D, V)}),
        ("heads of attention are as many", {"layers_1/attn/query/kernel": (D, V, K)}),
        ("an embedding is as wide", {"speaker_embed/embedding": (F, V)}),
        ("as many inputs", {"layers_7/kernel": (V, V)}),
        ("the vocabulary is the input", {"layers_7/kernel": (V, D)}),
        ("stacked", {"layers_7/kernel": (L, D, V), "layers_7/norm/scale": (L, V)}),
    ],
)
def test_other_last_layers_are_no_heads(why, extra):
    shapes = {"embed/embedding": (V, D), **BLOCKS, "layers_7/kernel": (D, V)}
    assert read(shapes)["layers_7/kernel"] == "head"
    assert read({**shapes, **extra})["layers_7/kernel"] != "head", why


def test_last_layers_of_blocks_are_no_heads():
    """Also if it is the one matrix that is as long as the vocabulary."""
    for path in ("blocks/0/mlp/layers/1/weight", "block_0/Dense_1/kernel", "attn/Dense_0/kernel"):
        shape = (V, D) if path.endswith("weight") else (D, V)
        shapes = {"embed/embedding": (V, D), "blocks/0/up/kernel": (D, F), path: shape}
        assert "head" not in read(shapes).values()


def test_named_layers_of_vocabulary_size_are_no_heads():
    assert read({"embed/embedding": (V, D), "router/kernel": (D, V)})["router/kernel"] == PLAIN


@pytest.mark.parametrize(
    "path",
    [
        "layers_0/attention/output/kernel",
        "layers_0/attention/o_proj/kernel",
        "attention/out/kernel",
        "blocks/0/mlp/fc_out/weight",
        "layers_0/attention/score/kernel",
        "self_attn/score/kernel",
        "head/query/kernel",
        "head/blocks/0/mlp/up/kernel",
    ],
)
@pytest.mark.parametrize("shape", [(D, D), (D, V), (V, D)])
def test_names_of_heads_inside_of_blocks_are_no_heads(path, shape):
    assert "head" not in read({"embed/embedding": (V, D), path: shape}).values()


def test_score_beside_a_query_is_no_head():
    shapes = {"mixer/query/kernel": (D, D), "mixer/score/kernel": (D, D)}
    assert read(shapes)["mixer/score/kernel"] == PLAIN


@pytest.mark.parametrize(
    "path",
    [
        "wpe/embedding",
        "pos_embed/embedding",
        "embed_positions/embedding",
        "position/embedding",
        "token_type_embeddings/embedding",
        "segment_embed/embedding",
        "time_embed/embedding",
        "relative_attention_bias/embedding",
    ],
)
def test_tables_that_are_no_vocabularies(path):
    shapes = {path: (V, D), "fc_out/kernel": (D, V)}
    assert read(shapes) == {path: "embedding", "fc_out/kernel": PLAIN}
    assert read({"wte/embedding": (V, D), "fc_out/kernel": (D, V)})["fc_out/kernel"] == "head"


def test_vectors_with_names_of_tables_are_part_of_a_stack():
    shapes = {
        "body/embed_norm/scale": (L, D),
        "body/pos_bias": (L, D),
        "body/up/kernel": (L, D, F),
    }
    assert read(shapes)["body/up/kernel"] == PLAIN_1


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("norm/scale", (L, D)),
        ("layers/ln1/scale", (L, D)),
        ("input_layernorm/weight", (L, D)),
        ("RMSNorm_0/scale", (D, L)),
        ("query/bias", (H, K)),
        ("query/bias", (L, H, K)),
        ("moe/down_proj_bias", (E, D)),
        ("cls_token", (1, 1, D)),
        ("layer_scale/gamma", (L, D)),
        ("per_dim_scale", (H, K)),
        ("bias", ()),
        ("kernel", (D,)),
        ("kernel", (D, 1)),
    ],
)
def test_vectors(path, shape):
    assert read({path: shape}) == {path: "vector"}


def test_linear_layers_with_the_word_norm_around_them():
    found = read({"adaln/norm1/linear/kernel": (D, F), "embedding_net/fc/kernel": (D, F)})
    assert set(found.values()) == {PLAIN}


def test_an_embedding_of_the_stacks_width_is_no_part_of_it():
    shapes = {"embed": (50, 8), "layers/mlp/kernel": (3, 8, 16), "layers/norm/scale": (3, 8)}
    found = dict(zip(shapes, layouts(list(shapes), list(shapes.values())), strict=True))
    view = found["layers/mlp/kernel"].view
    assert (view.batch_axes, view.reduction_axes, view.output_axes) == ((0,), (1,), (2,))
