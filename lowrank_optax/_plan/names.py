"""The names that layers have: one vocabulary, for the default rule and for the presets.

Here is what a path says by itself. What takes shapes or neighbours to say, such as that an
``output`` is as long as the vocabulary, is in :mod:`lowrank_optax._plan.layouts`.

Each regex below is for one component of a path; those that have ``/`` in them fit a whole path
too. A path's *layer* is what is left of it without the name of the array.
"""

import re
from collections.abc import Sequence

# Norms: LayerNorm_0, input_layernorm, ln_f, q_norm.
NORM = re.compile(r"(?i)norm(\d|_|$)|(^|_)(rms|layer|group|batch|q|k)?ln(\d|_|$)|^ln\w?$")
# Norms of queries and keys: their scales may have a heads axis that is no stack.
HEAD_NORM = re.compile(r"(?i)(^|_)(q|k|query|key)_?(norm|ln)")
# Vectors that are called after what they do.
VECTOR = re.compile(r"^(bias|scale|gamma|beta|offset|b_\w+|\w+_(bias|scale))$")
# A bias, or any second matrix of a small program.
BIAS = re.compile(r"^b\d*$")

# Tables of embeddings, by the name of the array or of its layer.
EMBEDDING = re.compile(r"(?i)embed|(^|_)emb(s|\d*)(_|$)|^w[tp]e$|vocab|^tok(en)?s?$")
# Tables of positions that do not say embedding.
POSITION = re.compile(r"(?i)^(abs_|rel_|relative_)?pos(ition(s|al)?)?(_|$)")
# Tables whose length is no vocabulary's: positions, segments, distances, steps in time.
NO_VOCABULARY = re.compile(r"(?i)(^|_)pos(_|$|ition)|^wpe$|(^|_)type|segment|relative|(^|_)time")

# Heads, and whatever is inside them.
HEAD = re.compile(
    r"(?i)^(m?lm_?head\w*|cls_head|qa_outputs|unembed\w*|embed_out|to_logits"
    r"|logits?_?dense|logits(_\w+)?|classifier|readout)$"
)
# A head by itself or right around a layer; farther out it holds whole blocks.
HEAD_LAYER = re.compile(r"(?i)^head$")
# A head but in attention, which has scores of its own.
SCORE = re.compile(r"(?i)^score$")
# Names that other layers have too: a head at the top of the tree, or by the vocabulary's size.
HEAD_AT_TOP = re.compile(r"(?i)^(output(_layer)?|predictions?)$")
HEAD_BY_SIZE = re.compile(r"(?i)^(out(put)?(_(layer|proj))?|decoder|predictions?|fc_out)$")
# Names that say nothing, such as a counter: a head by the vocabulary's size, and as the last.
UNNAMED = re.compile(r"(?i)^((?:dense|linear|fc|layers?)?_?)(\d*)$")

# What may be around the top of the tree.
TOP = re.compile(r"(?i)^(params|model|module|transformer|decoder)$")
# What is around the layers of a block.
BLOCK = re.compile(r"(?i)\d$|attn|attention")
# What holds blocks; stacked ones, if no number follows.
CONTAINER = re.compile(r"(?i)^(\w*layers|\w*blocks|stack|stacked|scan\w*|repeat(ed)?|h)$")

ATTENTION = re.compile(r"(?i)attn|attention|(^|[/_])mha|multi_?head")
ATTENTION_IN = re.compile(r"(?i)^(w?_?(q|k|v|qkv|kv)(_[ab])?(_proj)?|query|key|value|to_[qkv]+)$")
ATTENTION_OUT = re.compile(r"(?i)^(w?o|out|o_proj|out_proj|output|to_out)$")
# Of attention if nothing around says otherwise; an MLP may have a wo, too.
ATTENTION_BY_DEFAULT = re.compile(
    r"(?i)(^|/)(w?_?(q|k|v|o|qkv|kv)(_proj|_einsum)?|query|key|value|out|attn_vec_einsum)(/|$)"
)
MLP = re.compile(
    r"(?i)(^|[/_])(mlp|feed_?forward|moe|expert)"
    r"|(^|/)(ffn?\d?|(gate|up|down)(_proj)?|wi(_\d)?|w[123]|fc_?\w*|intermediate)(/|$)"
    r"|/output/dense/"
)
EXPERTS = re.compile(r"(?i)expert|moe|mixture")
ROUTER = re.compile(r"(?i)^(router|gate)$")
CONVOLUTION = re.compile(r"(?i)conv")

# Names of the array itself; the layer's name is the component before.
ARRAY = re.compile(r"(?i)^(kernel|w|weights?|embeddings?)$")
# Arrays that PyTorch's convention stores as (output, input): Equinox.
OUTPUT_FIRST = re.compile(r"^weight(_\w+)?$")

# Einsum layers of Gemma and its kin: (reduction axes, output axes) after any stacking axis.
EINSUM = {
    "q_einsum": ((1,), (0, 2)),  # (heads, d, head_dim)
    "kv_einsum": ((2,), (0, 1, 3)),  # (2, heads, d, head_dim)
    "qkv_einsum": ((2,), (0, 1, 3)),
    "attn_vec_einsum": ((0, 1), (2,)),  # (heads, head_dim, d)
    "gating_einsum": ((1,), (2,)),  # (2, d, f): two matrices, in either order of d and f
}


def layer_of(parts: Sequence[str]) -> tuple[str, ...]:
    """The path of the layer that owns an array."""
    own = len(parts) > 1 and ARRAY.match(parts[-1])
    return tuple(parts[:-1] if own else parts)


def is_norm(parts: Sequence[str]) -> bool:
    """Whether a path is that of a norm's array; a kernel near one belongs to a linear layer."""
    return parts[-1] != "kernel" and any(NORM.search(part) for part in parts[-2:])


def is_embedding(parts: Sequence[str]) -> bool:
    """Whether a path is that of an embedding table, unless it is a head's (``unembed``)."""
    if any(EMBEDDING.search(part) for part in parts[-2:]):
        return True
    return bool(POSITION.match(layer_of(parts)[-1])) and parts[-1] not in ("kernel", "w")


def is_head(parts: Sequence[str]) -> bool:
    """Whether a path names a head, whatever is beside it and whatever its shape."""
    if any(HEAD.match(part) for part in parts):
        return True
    *around, name = layer_of(parts)
    if SCORE.match(name):
        return not any(ATTENTION.search(part) for part in around)
    # One head of an attention may be called so, too.
    return any(HEAD_LAYER.match(p) for p in (*around[-1:], name)) and not ATTENTION_IN.match(name)


def is_output_at_top(parts: Sequence[str]) -> bool:
    """Whether a path names the output of a whole model, unless that is a bare attention."""
    *around, name = layer_of(parts)
    return bool(HEAD_AT_TOP.match(name)) and all(TOP.match(part) for part in around)


def is_unnamed_last(layer: Sequence[str], layers: Sequence[Sequence[str]]) -> bool:
    """Whether a layer's name says nothing and it is the last of those counted with it."""
    *around, name = layer
    own = UNNAMED.match(name)
    if own is None:
        return False
    depth = len(around)
    beside = {o[depth] for o in layers if len(o) > depth and list(o[:depth]) == around}
    found = [match for match in map(UNNAMED.match, beside) if match and match[1] == own[1]]
    return int(own[2] or 0) == max(int(match[2] or 0) for match in found)
