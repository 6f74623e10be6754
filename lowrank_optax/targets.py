"""Target presets: which leaves to project, and at which rank.

Each function returns a list of ``(regex, rank)`` rules for ``targets=``; the first match
decides. Put your own rules in front: ``targets=[("mlp/down", 64), *lro.targets.finetune()]``.
"""

from lowrank_optax._target import Rank, TargetLike

_ATTENTION = r"(?i)(^|[/_.])(self_?|cross_?)?(attn|attention|mha|multiheadattention)"
_ATTENTION_NAMES = (
    r"(?i)/(w?(q|k|v|o|qkv|kv)(_proj|_einsum)?|query|key|value|out|attn_vec_einsum)(/|$)"
)
_MLP = r"(?i)(mlp|ffn?|feed_?forward|moe|experts?|gate|up|down|wi(_\d)?|fc\d?)([_/]|$)"
_EMBEDDING = r"(?i)(embed|wte|wpe|vocab)"
_HEAD = r"(?i)(^|/)(lm_?head|logits(_dense)?|unembed|head|output)/"
_NORM = r"(?i)(norm|(^|/)ln(_\w+)?)(/|$|_)"

Rules = list[tuple[str, TargetLike]]


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
        (_EMBEDDING, None),
        (_HEAD, None),
        (_ATTENTION, attention),
        (_ATTENTION_NAMES, attention),
        (_MLP, mlp),
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
        (_EMBEDDING, embedding),
        (_HEAD, head),
        (_ATTENTION, attention),
        (_ATTENTION_NAMES, attention),
        (_MLP, mlp),
    ]
