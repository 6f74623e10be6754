"""Presets, on the names and shapes of real models."""

import copy
import functools
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import lowrank_optax as lro
from lowrank_optax._plan.layouts import Kind, layouts
from lowrank_optax._plan.make_plan import make_plan

D, F, V, H, K, L = 512, 1024, 4096, 8, 64, 3


def nested(shapes):
    """A tree of shapes from slash-separated paths."""
    tree = {}
    for path, shape in shapes.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def ranks(targets, params, rank=1):
    """``{path: (rank, sides)}`` of what is projected, with no warning on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = make_plan(params, targets, rank, "smaller")
    return {leaf.path: (leaf.rank, leaf.sides) for leaf in plan.projections}


ATTENTION, MLP, EMBEDDING, HEAD = "attention", "mlp", "embedding", "head"

HF_LIKE = {
    "model/embed_tokens/embedding": ((V, D), EMBEDDING),
    "model/layers/input_layernorm/weight": ((L, D), None),
    "model/layers/self_attn/q_proj/kernel": ((L, D, D), ATTENTION),
    "model/layers/self_attn/k_proj/kernel": ((L, D, D), ATTENTION),
    "model/layers/self_attn/v_proj/kernel": ((L, D, D), ATTENTION),
    "model/layers/self_attn/v_proj/bias": ((L, D), None),
    "model/layers/self_attn/o_proj/kernel": ((L, D, D), ATTENTION),
    "model/layers/self_attn/q_norm/weight": ((L, K), None),
    "model/layers/mlp/gate_proj/kernel": ((L, D, F), MLP),
    "model/layers/mlp/up_proj/kernel": ((L, D, F), MLP),
    "model/layers/mlp/down_proj/kernel": ((L, F, D), MLP),
    "model/norm/weight": ((D,), None),
    "lm_head/kernel": ((D, V), HEAD),
}
TUNIX = {
    "embedder/input_embedding": ((V, D), EMBEDDING),
    "layers/0/attn/q_einsum/w": ((H, D, K), ATTENTION),
    "layers/0/attn/kv_einsum/w": ((2, H, D, K), ATTENTION),
    "layers/0/attn/attn_vec_einsum/w": ((H, K, D), ATTENTION),
    "layers/0/attn/_query_norm/scale": ((K,), None),
    "layers/0/mlp/gate_proj/kernel": ((D, F), MLP),
    "layers/0/mlp/down_proj/kernel": ((F, D), MLP),
    "layers/0/pre_attention_norm/scale": ((D,), None),
    "layers/1/attn/q_proj/w": ((D, H, K), ATTENTION),
    "layers/1/attn/o_proj/w": ((H, K, D), ATTENTION),
    "lm_head/w": ((D, V), HEAD),
}
MAXTEXT = {
    "params/decoder/decoder_norm/scale": ((D,), None),
    "params/decoder/layers/mlp/wi_0/kernel": ((D, L, F), MLP),
    "params/decoder/layers/mlp/wo/kernel": ((F, L, D), MLP),
    "params/decoder/layers/pre_self_attention_layer_norm/scale": ((D, L), None),
    "params/decoder/layers/self_attention/out/kernel": ((H, L, K, D), ATTENTION),
    "params/decoder/layers/self_attention/query/kernel": ((D, L, H, K), ATTENTION),
    "params/decoder/logits_dense/kernel": ((D, V), HEAD),
    "params/token_embedder/embedding": ((V, D), EMBEDDING),
}
MOE = {
    "params/decoder/moe_layers/MoeBlock_0/gate/kernel": ((D, L, 512), MLP),
    "params/decoder/moe_layers/MoeBlock_0/wi_0": ((8, L, D, F), MLP),
    "params/decoder/moe_layers/MoeBlock_0/wo": ((8, L, F, D), MLP),
    "params/decoder/moe_layers/pre_self_attention_layer_norm/scale": ((D, L), None),
    "params/decoder/moe_layers/self_attention/query/kernel": ((D, L, H, K), ATTENTION),
    "params/decoder/moe_layers/self_attention/out/kernel": ((H, L, K, D), ATTENTION),
}
BERT = {
    "bert/embeddings/word_embeddings/embedding": ((V, D), EMBEDDING),
    "bert/embeddings/position_embeddings/embedding": ((V, D), EMBEDDING),
    "bert/embeddings/LayerNorm/scale": ((D,), None),
    "bert/encoder/layer/0/attention/self/query/kernel": ((D, D), ATTENTION),
    "bert/encoder/layer/0/attention/output/dense/kernel": ((D, D), ATTENTION),
    "bert/encoder/layer/0/attention/output/LayerNorm/scale": ((D,), None),
    "bert/encoder/layer/0/intermediate/dense/kernel": ((D, F), MLP),
    "bert/encoder/layer/0/output/dense/kernel": ((F, D), MLP),
    "classifier/kernel": ((D, 600), HEAD),
}
EQUINOX_AND_PLAIN = {
    "tok_emb/weight": ((V, D), EMBEDDING),
    "blocks/0/attn/query_proj/weight": ((D, D), ATTENTION),
    "blocks/0/mlp/layers/0/weight": ((F, D), MLP),
    "blocks/0/ln1/weight": ((D,), None),
    "blocks/1/wq": ((D, D), ATTENTION),
    "blocks/1/wo": ((D, D), ATTENTION),
    "blocks/1/w1": ((D, F), MLP),
    "blocks/1/fc_in/w": ((D, F), MLP),
    "blocks/1/group/up2/w": ((D, F), None),
    "unembed/weight": ((V, D), HEAD),
}
MODELS = {
    "hf": HF_LIKE,
    "tunix": TUNIX,
    "maxtext": MAXTEXT,
    "moe": MOE,
    "bert": BERT,
    "equinox": EQUINOX_AND_PLAIN,
}


def expected(model, by_kind):
    return {path: by_kind[kind] for path, (_, kind) in model.items() if kind in by_kind}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_finetune(model):
    params = nested({path: shape for path, (shape, _) in model.items()})
    found = ranks(lro.targets.finetune(), params)
    assert {path: rank for path, (rank, _) in found.items()} == expected(
        model, {ATTENTION: 16, MLP: 32}
    )
    found = ranks(lro.targets.finetune(attention=8, mlp=24), params)
    assert {path: rank for path, (rank, _) in found.items()} == expected(
        model, {ATTENTION: 8, MLP: 24}
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_pretrain(model):
    params = nested({path: shape for path, (shape, _) in model.items()})
    found = ranks(lro.targets.pretrain(), params)
    assert set(found) == set(expected(model, {ATTENTION: 0, MLP: 0}))
    # A quarter of the smaller side, d in all of these but for a q_norm.
    assert {rank for rank, _ in found.values()} == {D // 4}
    found = ranks(lro.targets.pretrain(0.5), params)
    assert {rank for rank, _ in found.values()} == {D // 2}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logra(model):
    params = nested({path: shape for path, (shape, _) in model.items()})
    found = ranks(lro.targets.logra(), params)
    assert {path: rank for path, (rank, _) in found.items()} == expected(
        model, {EMBEDDING: 128, ATTENTION: 64, MLP: 32, HEAD: 256}
    )


@pytest.mark.parametrize("vocabulary", [4096, 400])
def test_logra_never_projects_the_vocabulary(vocabulary):
    """Also where the vocabulary is the smaller side."""
    shapes = {
        "embed/embedding": (vocabulary, D),
        "lm_head/kernel": (D, vocabulary),
        "mlp/up/kernel": (D, F),
        "eqx/unembed/weight": (vocabulary, D),
    }
    params = nested(shapes)
    for side in ("smaller", "larger", "both"):
        plan = make_plan(params, lro.targets.logra(), 1, side)
        leaves = {leaf.path: leaf for leaf in plan.leaves}
        for path in ("embed/embedding", "lm_head/kernel", "eqx/unembed/weight"):
            (only,) = leaves[path].sides
            view = leaves[path].view
            assert (view.rows if only == "reduction" else view.columns) == D, path
        assert leaves["embed/embedding"].rank == 128
        assert leaves["lm_head/kernel"].rank == 256


def test_linen_model():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x))
            return nn.Dense(64, name="mlp_down")(nn.Dense(96, name="mlp_up")(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(128, 64)(tokens)
            return nn.Dense(128, name="lm_head")(Block(name="block")(x))

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    found = ranks(lro.targets.finetune(), params)
    block = "params/block"
    assert {path: rank for path, (rank, _) in found.items()} == {
        f"{block}/attention/key/kernel": 16,
        f"{block}/attention/out/kernel": 16,
        f"{block}/attention/query/kernel": 16,
        f"{block}/attention/value/kernel": 16,
        f"{block}/mlp_down/kernel": 32,
        f"{block}/mlp_up/kernel": 32,
    }


def test_own_rules_stand_in_front():
    params = nested({path: shape for path, (shape, _) in HF_LIKE.items()})
    found = ranks([("mlp/down", 64), ("o_proj", None), *lro.targets.finetune()], params)
    assert found["model/layers/mlp/down_proj/kernel"][0] == 64
    assert found["model/layers/mlp/up_proj/kernel"][0] == 32
    assert "model/layers/self_attn/o_proj/kernel" not in found
    # A rule of one's own still has to match.
    with pytest.warns(UserWarning, match="'conv' matched no leaf"):
        make_plan(params, [("conv", 4), *lro.targets.finetune()], 1, "smaller")


@pytest.mark.parametrize("preset", [lro.targets.finetune, lro.targets.pretrain, lro.targets.logra])
def test_a_preset_that_fits_nothing_is_an_error(preset):
    with pytest.raises(ValueError, match="targets matches no matrix among the 1 leaves"):
        make_plan({"dense": {"kernel": jnp.zeros((16, 16))}}, preset(), 1, "smaller")


@pytest.mark.parametrize("preset", [lro.targets.finetune, lro.targets.pretrain, lro.targets.logra])
def test_presets_check_their_ranks(preset):
    with pytest.raises(ValueError, match=r"rank=-0\.5"):
        make_plan({"mlp": {"kernel": jnp.zeros((16, 16))}}, preset(-0.5), 1, "smaller")


# One vocabulary for the default rule and the presets ------------------------------------------

PRESETS = (lro.targets.finetune, lro.targets.pretrain, lro.targets.logra)
SMALL = {
    "embed/embedding": (V, D),
    "layers_0/attn/query/kernel": (D, D),
    "layers_0/attn/out/kernel": (D, D),
    "layers_0/norm/scale": (D,),
    "layers_0/mlp/fc_in/kernel": (D, F),
    "layers_0/mlp/fc_out/kernel": (F, D),
    "layers_1/attn/query/kernel": (D, D),
    "layers_1/mlp/up/kernel": (D, F),
}
NAMED_HEADS = (
    "score",
    "mlm_head",
    "cls_head",
    "qa_outputs",
    "readout",
    "logitdense",
    "logits_dense",
    "lm_head",
    "head",
    "unembed",
    "embed_out",
    "to_logits",
    "classifier",
    "output",
    "predictions",
    "classifier/dense",
    "mlm_head/dense",
    "head/fc",
)
HEADS_BY_SIZE = (
    "fc_out",
    "out_proj",
    "decoder",
    "cls/predictions/decoder",
    "layers_7",
    "layers/7",
    "Dense_0",
    "linear",
)


def kinds(shapes):
    found = layouts(list(shapes), list(shapes.values()))
    return {path: layout.kind for path, layout in zip(shapes, found, strict=True)}


@functools.cache
def small_ranks(preset):
    found = ranks(preset and preset(), nested(SMALL), 8)
    assert "layers_0/attn/query/kernel" in found
    return found


def check_agreement(path, shape, kind, rank, sides):
    """A leaf in a small model is of one kind to all, and changes nothing about the others."""
    shapes = {**SMALL, path: shape}
    assert kinds(shapes) == {**kinds(SMALL), path: kind}
    params = nested(shapes)
    assert ranks(None, params, 8) == ranks(lro.targets.default(), params, 8) == small_ranks(None)
    for preset in PRESETS[:2]:
        assert ranks(preset(), params, 8) == small_ranks(preset)
    found = ranks(lro.targets.logra(), params, 8)
    assert found.pop(path, None) == (rank and (rank, sides))
    assert found == small_ranks(lro.targets.logra)


@pytest.mark.parametrize("name", [*NAMED_HEADS, *HEADS_BY_SIZE])
@pytest.mark.parametrize(
    ("prefix", "array", "shape"), [("", "kernel", (D, V)), ("params/", "weight", (V, D))]
)
def test_heads_are_heads_to_all(prefix, name, array, shape):
    check_agreement(f"{prefix}{name}/{array}", shape, Kind.HEAD, 256, ("reduction",))


@pytest.mark.parametrize("name", NAMED_HEADS)
def test_heads_by_their_path(name):
    assert lro.targets.leaf_class(f"{name}/kernel") == HEAD
    assert lro.targets.leaf_class(f"params/{name}/weight") == HEAD


@pytest.mark.parametrize(
    "path",
    [
        "tok_emb/weight",
        "wte/embedding",
        "wpe/embedding",
        "vocab/embedding",
        "tokens/embedding",
        "pos/embedding",
        "abs_pos",
        "position",
        "positional_encoding",
        "relative_attention_bias_embed/embedding",
        "embeddings/word_embeddings/embedding",
    ],
)
def test_embeddings_are_embeddings_to_all(path):
    check_agreement(path, (V + 1, D), Kind.EMBEDDING, 128, ("output",))
    assert lro.targets.leaf_class(path) == EMBEDDING


@pytest.mark.parametrize(
    "name",
    [
        "norm",
        "norm1",
        "prenorm_2",
        "ln_f",
        "ln1",
        "lnf",
        "q_ln",
        "RMSNorm_0",
        "input_layernorm",
        "LayerNorm_3",
        "attn/q_norm",
        "mlp/norm",
        "lm_head/layer_norm",
        "embeddings/LayerNorm",
    ],
)
def test_norms_are_norms_to_all(name):
    # A stack's scales look like a matrix.
    check_agreement(f"{name}/weight", (L * 64, D), Kind.VECTOR, None, None)
    assert lro.targets.leaf_class(f"{name}/weight") == "other"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers_1/attention/output/kernel", ATTENTION),
        ("layers_1/attention/o_proj/kernel", ATTENTION),
        ("layers_1/attention/score/kernel", ATTENTION),
        ("layers_1/out/kernel", ATTENTION),
        ("layers_1/mlp/fc_out/kernel", MLP),
        ("layers_1/mlp/decoder/kernel", MLP),
        ("layers_1/output/dense/kernel", MLP),
        ("head/query/kernel", ATTENTION),
        ("head/blocks/0/mlp/up/kernel", MLP),
        ("embedding_net/fc/kernel", MLP),
        ("norm_net/mlp/fc/kernel", MLP),
    ],
)
def test_names_of_heads_embeddings_and_norms_around_linear_layers(path, kind):
    shapes = {**SMALL, path: (D, D)}
    assert kinds(shapes)[path] is Kind.MATRIX
    assert lro.targets.leaf_class(path) == kind
    params = nested(shapes)
    assert ranks(None, params, 8)[path][0] == 8
    assert ranks(lro.targets.default(), params, 8)[path][0] == 8
    for preset, wanted in zip(
        PRESETS,
        ({ATTENTION: 16, MLP: 32}, {ATTENTION: D // 4, MLP: D // 4}, {ATTENTION: 64, MLP: 32}),
        strict=True,
    ):
        assert ranks(preset(), params)[path][0] == wanted[kind]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_a_path_says_is_what_the_default_rule_sees(model):
    found = kinds({path: shape for path, (shape, _) in model.items()})
    for path, kind in found.items():
        by_path = lro.targets.leaf_class(path)
        assert (by_path == HEAD) == (kind is Kind.HEAD), path
        assert (by_path == EMBEDDING) == (kind is Kind.EMBEDDING), path


def test_own_rules_stand_in_front_of_heads_without_a_name():
    params = nested({**SMALL, "layers_7/kernel": (D, V)})
    rules = [("layers_7", 8), *lro.targets.finetune()]
    assert ranks(rules, params)["layers_7/kernel"] == (8, ("reduction",))


def test_rank_probe_sees_the_kinds_of_a_preset():
    shapes = {"embed/embedding": (48, 16), "mlp/kernel": (16, 24), "layers_7/kernel": (16, 48)}
    grads = {p: jax.random.normal(jax.random.key(0), shape) for p, shape in shapes.items()}
    probe = lro.rank_probe([grads], targets=lro.targets.logra())
    sides = {path: found.leaf.sides for path, found in probe.leaves.items()}
    assert sides == {
        "embed/embedding": ("output",),
        "mlp/kernel": ("reduction",),
        "layers_7/kernel": ("reduction",),
    }
    assert set(lro.rank_probe([grads], targets=lro.targets.finetune()).leaves) == {"mlp/kernel"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_presets_can_be_copied(duplicate):
    params = nested({**SMALL, "layers_7/kernel": (D, V)})
    rules = lro.targets.logra()
    assert ranks(duplicate(rules), params) == ranks(rules, params)
