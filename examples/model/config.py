"""The shape of the decoder, and some that are published."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from model.rotary import RopeScaling


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Fields are named as in a Hugging Face ``config.json``.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU feed-forward layer.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, each shared by a group of query heads.
        head_dim: width of a head; ``None`` means ``hidden_size / num_attention_heads``.
        max_position_embeddings: the longest sequence that `Decoder` accepts.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched, as in LLaMA 3.1 and later; ``None`` leaves them.
        rms_norm_eps: added to the mean square in every norm.
        tie_word_embeddings: read the logits off with the embedding instead of an ``lm_head``.
        attention_bias: biases on the query, key and value projections, as in Qwen2.
        qk_norm: norms on the heads of queries and keys, as in Qwen3.
        lora_ranks: projections with a frozen kernel and adapters of a rank, by name (`lora`).
        lora_alpha: adapters are scaled by ``lora_alpha / rank``.
        remat: keep only the layer boundaries for the backward pass, and recompute the rest.
        param_dtype: what the parameters are stored in.
        dtype: what the layers compute in, apart from norm statistics, rotations, softmax and
            logits, which are float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    lora_ranks: tuple[tuple[str, int], ...] = ()
    lora_alpha: float = 16.0
    remat: bool = False
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every key-value head serves the "
                "same number of query heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}; change one of them or set "
                "head_dim"
            )
        if self.resolved_head_dim < 2 or self.resolved_head_dim % 2:
            raise ValueError(
                f"head_dim={self.resolved_head_dim} must be even and positive: rotary positions "
                "turn pairs of channels"
            )
        for name in ("param_dtype", "dtype"):
            if not jnp.issubdtype(getattr(self, name), jnp.floating):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a floating-point type")

    @property
    def resolved_head_dim(self) -> int:
        """The width of a head, derived where ``head_dim`` is ``None``."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def tiny(cls, **changes: Any) -> "DecoderConfig":
        """0.8 million parameters that read bytes: trains in a minute or two on a laptop."""
        sizes: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
        return cls(**(sizes | changes))

    @classmethod
    def qwen2_0_5b(cls, **changes: Any) -> "DecoderConfig":
        """Qwen2-0.5B and Qwen2.5-0.5B."""
        sizes: dict[str, Any] = {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "remat": True,
        }
        return cls(**(sizes | changes))

    @classmethod
    def llama2_7b(cls, **changes: Any) -> "DecoderConfig":
        """LLaMA-2-7B, the size that papers on low-rank optimizers report."""
        sizes: dict[str, Any] = {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "remat": True,
        }
        return cls(**(sizes | changes))
