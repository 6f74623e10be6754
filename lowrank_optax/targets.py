"""Target presets: which leaves to project, and at which rank.

Each function returns a list of ``(regex, rank)`` rules for ``targets=``; the first match
decides. Put your own rules in front: ``targets=[("mlp/down", 64), *lro.targets.finetune()]``.
What the default rule (``targets=None``) takes for a head, an embedding, a norm or a bias is that
to every preset, by its name or by its shape.
"""

from lowrank_optax._checks import Rank
from lowrank_optax._plan import names
from lowrank_optax._plan.target import ByDefault, OfKind, OptionalPattern, TargetLike

Rules = list[tuple[str, TargetLike]]

_VECTOR, _HEAD, _EMBEDDING = OfKind("vector"), OfKind("head"), OfKind("embedding")
_ATTENTION = OptionalPattern(names.ATTENTION.pattern)
_MLP = OptionalPattern(names.MLP.pattern)
_ATTENTION_BY_DEFAULT = OptionalPattern(names.ATTENTION_BY_DEFAULT.pattern)

CLASSES = ("attention", "mlp", "embedding", "head", "other")
"""What :func:`leaf_class` tells apart."""


def leaf_class(path: str) -> str:
    """What kind of weight a path names, as far as a path says it.

    Presets and the default rule know the same names and also see shapes: to them a ``fc_out``
    outside of blocks, or a last layer ``layers/7``, is a head if it is as long as the
    vocabulary. A norm, and what has no known name, is ``"other"``; a bias is of the class of
    its layer.

    Args:
        path: a leaf's path, ``decoder/layers/q/kernel``.

    Returns:
        One of :data:`CLASSES`.

    Example:
        >>> import lowrank_optax as lro
        >>> lro.targets.leaf_class("layers/self_attn/q_proj/kernel")
        'attention'
    """
    parts = path.split("/")
    if names.is_norm(parts):
        return "other"
    if names.is_head(parts) or names.is_output_at_top(parts):
        return "head"
    if names.is_embedding(parts):
        return "embedding"
    for name, pattern in (
        ("attention", names.ATTENTION),
        ("mlp", names.MLP),
        ("attention", names.ATTENTION_BY_DEFAULT),
    ):
        if pattern.search(path):
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
        (_VECTOR, None),
        (_HEAD, None),
        (_EMBEDDING, None),
        (_ATTENTION, attention),
        (_MLP, mlp),
        (_ATTENTION_BY_DEFAULT, attention),
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
        (_VECTOR, None),
        (_HEAD, head),
        (_EMBEDDING, embedding),
        (_ATTENTION, attention),
        (_MLP, mlp),
        (_ATTENTION_BY_DEFAULT, attention),
    ]
