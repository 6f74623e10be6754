"""Target presets: which leaves to project, and at which rank.

Each function returns a list of ``(regex, rank)`` rules for ``targets=``; the first match
decides. Put your own rules in front: ``targets=[("mlp/down", 64), *lro.targets.finetune()]``.
"""

import re

from lowrank_optax._checks import Rank
from lowrank_optax._plan.target import ByDefault, OptionalPattern, TargetLike

Rules = list[tuple[str, TargetLike]]

_NORM = OptionalPattern(r"(?i)(norm|(^|/)ln(_?\w)?)(\d|/|$|_)")
_HEAD = OptionalPattern(
    r"(?i)(^|/)(lm_?head\w*|head|unembed\w*|embed_out|to_logits|logits(_\w+)?|classifier)(/|$)"
    r"|^(params/)?(output|predictions)/"
)
_EMBEDDING = OptionalPattern(
    r"(?i)embed|(^|[/_])emb(s|\d*)(_|/|$)|(^|/)w[tp]e(/|$)|vocab|(^|/)pos_"
)
_ATTENTION = OptionalPattern(r"(?i)attn|attention|(^|[/_])mha|multi_?head")
_MLP = OptionalPattern(
    r"(?i)(^|[/_])(mlp|feed_?forward|moe|expert)"
    r"|(^|/)(ffn?\d?|(gate|up|down)(_proj)?|wi(_\d)?|w[123]|fc_?\w*|intermediate)(/|$)"
    r"|/output/dense/"
)
# Names that say little; an MLP may have a wo, too.
_ATTENTION_NAMES = OptionalPattern(
    r"(?i)(^|/)(w?_?(q|k|v|o|qkv|kv)(_proj|_einsum)?|query|key|value|out|attn_vec_einsum)(/|$)"
)

CLASSES = ("attention", "mlp", "embedding", "head", "other")
"""What :func:`leaf_class` tells apart."""


def leaf_class(path: str) -> str:
    """What kind of weight a path names, as the presets read it.

    Args:
        path: a leaf's path, ``decoder/layers/q/kernel``.

    Returns:
        One of :data:`CLASSES`.

    Example:
        >>> import lowrank_optax as lro
        >>> lro.targets.leaf_class("layers/self_attn/q_proj/kernel")
        'attention'
    """
    for name, pattern in (
        ("other", _NORM),
        ("head", _HEAD),
        ("embedding", _EMBEDDING),
        ("attention", _ATTENTION),
        ("mlp", _MLP),
        ("attention", _ATTENTION_NAMES),
    ):
        if re.search(pattern, path):
            return name
    return "other"


def default() -> Rules:
    """What ``targets=None`` does, as a rule: matrices of linear layers, at the tracker's rank.

    Returns:
        One rule that matches every leaf, for the end of a list.

    Example:
        >>> import lowrank_optax as lro
        >>> tracker = lro.refresh_basis(64, targets=[("router", None), *lro.targets.default()])
    """
    return [(OptionalPattern(""), ByDefault())]


def finetune(attention: Rank = 16, mlp: Rank = 32) -> Rules:
    """For fine-tuning: small ranks on attention and feed-forward matrices.

    Args:
        attention: rank of attention matrices; 8 to 16 is usual.
        mlp: rank of feed-forward matrices; 16 to 32 is usual.

    Returns:
        Rules; everything else is trained full-rank.

    Example:
        >>> import lowrank_optax as lro
        >>> tracker = lro.refresh_basis(targets=lro.targets.finetune(attention=8))
    """
    return [
        (_NORM, None),
        (_HEAD, None),
        (_EMBEDDING, None),
        (_ATTENTION, attention),
        (_MLP, mlp),
        (_ATTENTION_NAMES, attention),
    ]


def pretrain(fraction: float = 0.25) -> Rules:
    """For pretraining: a share of each block matrix's smaller side, a quarter by default.

    Args:
        fraction: rank as a share of the smaller side, in (0, 1].

    Returns:
        Rules for attention and feed-forward matrices.
    """
    return finetune(attention=fraction, mlp=fraction)


def logra(embedding: Rank = 128, attention: Rank = 64, mlp: Rank = 32, head: Rank = 256) -> Rules:
    """LoGRA's table of ranks, which projects embeddings and the LM head too.

    An embedding ``(vocabulary, d)`` and a head ``(d, vocabulary)`` are projected on their d
    side only.

    Args:
        embedding: rank of embeddings.
        attention: rank of attention matrices.
        mlp: rank of feed-forward matrices.
        head: rank of the LM head.

    Returns:
        Rules; norms and biases are trained full-rank.
    """
    return [
        (_NORM, None),
        (_HEAD, head),
        (_EMBEDDING, embedding),
        (_ATTENTION, attention),
        (_MLP, mlp),
        (_ATTENTION_NAMES, attention),
    ]
