"""A decoder in plain JAX, every weight a matrix of its own.

Layers are not stacked here, since some of the optimizers compared only project matrices.
"""

import dataclasses
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

# Name, then the names of its input and output sizes, of each matrix in a block.
MATRICES = {
    "q": ("width", "width"),
    "k": ("width", "width"),
    "v": ("width", "width"),
    "o": ("width", "width"),
    "gate": ("width", "hidden"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
}
HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a decoder and of its batches.

    Attributes:
        width: of the residual stream.
        hidden: of the feed-forward layer.
        layers: number of blocks.
        vocabulary: number of tokens.
        batch: sequences a step.
        length: tokens a sequence.
    """

    width: int = 512
    hidden: int = 1408
    layers: int = 4
    vocabulary: int = 2048
    batch: int = 4
    length: int = 256


def init(size: Size, seed: int = 0) -> dict:
    """Float32 params, made by NumPy so that every framework starts alike."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

    blocks = [
        {name: normal(getattr(size, i), getattr(size, o)) for name, (i, o) in MATRICES.items()}
        | {"norm1": np.ones(size.width, np.float32), "norm2": np.ones(size.width, np.float32)}
        for _ in range(size.layers)
    ]
    embedding = 0.02 * rng.standard_normal((size.vocabulary, size.width))
    return {
        "embedding": embedding.astype(np.float32),
        "blocks": blocks,
        "norm": np.ones(size.width, np.float32),
        "lm_head": normal(size.width, size.vocabulary),
    }


def is_block_matrix(path: str) -> bool:
    """Whether a leaf is a matrix of a block: what every low-rank contender projects."""
    return path.split("/")[-1] in MATRICES


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _attention(block, x):
    batch, length, width = x.shape
    heads = (batch, length, width // HEAD_DIM, HEAD_DIM)
    q, k, v = ((x @ block[name]).reshape(heads) for name in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape) @ block["o"]


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    """Mean next-token cross entropy of ``(batch, length + 1)`` token ids."""
    x = params["embedding"][tokens[:, :-1]]
    for block in params["blocks"]:
        x = x + _attention(block, _norm(x, block["norm1"]))
        y = _norm(x, block["norm2"])
        x = x + (jax.nn.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
    logits = _norm(x, params["norm"]) @ params["lm_head"]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def batches(size: Size, count: int, seed: int = 0) -> np.ndarray:
    """``(count, batch, length + 1)`` tokens: bytes of the standard library's source."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = np.frombuffer(text, np.uint8)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - size.length - 1, (count, size.batch, 1))
    return data[starts + np.arange(size.length + 1)].astype(np.int32) % size.vocabulary
