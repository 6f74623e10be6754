"""Decoders by name or by a Hugging Face ``config.json``: their sizes, weights and shardings.

Only shapes: nothing here holds a number that was trained.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lowrank_optax._arrays.tree import Params
from lowrank_optax._checks import choose


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of the LLaMA family.

    Attributes:
        layers: number of blocks.
        width: of the residual stream.
        hidden: of the SwiGLU feed-forward layer.
        heads: query heads.
        kv_heads: key and value heads, each shared by a group of query heads.
        vocabulary: number of tokens.
        head_dim: width of a head; None for ``width / heads``.
        tied: whether the logits are read off with the embedding.
        attention_bias: whether queries, keys and values have biases.
        name: for people.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int | None = None
    tied: bool = False
    attention_bias: bool = False
    name: str = "model"

    def __post_init__(self):
        for field in ("layers", "width", "hidden", "heads", "kv_heads", "vocabulary"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.name}: {field}={value!r} must be a whole number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads are not a multiple of {self.kv_heads} key-value "
                "heads; each of these serves the same number of query heads"
            )
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"{self.name}: width {self.width} is not a multiple of {self.heads} heads; give "
                "head_dim"
            )

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def query_width(self) -> int:
        """The width of all queries together."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """The width of all keys together, and of all values."""
        return self.kv_heads * self.head_width


_SIZES: dict[str, tuple[int, ...]] = {
    # layers, width, hidden, heads, key-value heads, vocabulary
    "tinyllama-1.1b": (22, 2048, 5632, 32, 4, 32_000),
    "llama-7b": (32, 4096, 11_008, 32, 32, 32_000),
    "llama-13b": (40, 5120, 13_824, 40, 40, 32_000),
    "llama-70b": (80, 8192, 28_672, 64, 8, 32_000),
    "llama3-8b": (32, 4096, 14_336, 32, 8, 128_256),
    "llama3-70b": (80, 8192, 28_672, 64, 8, 128_256),
    "mistral-7b": (32, 4096, 14_336, 32, 8, 32_000),
    "qwen2-0.5b": (24, 896, 4864, 14, 2, 151_936),
    "qwen2-1.5b": (28, 1536, 8960, 12, 2, 151_936),
    "qwen2-7b": (28, 3584, 18_944, 28, 4, 152_064),
    "qwen2-72b": (80, 8192, 29_568, 64, 8, 152_064),
}
_TIED = ("qwen2-0.5b", "qwen2-1.5b")

MODELS: dict[str, ModelShape] = {
    name: ModelShape(*sizes, tied=name in _TIED, attention_bias=name.startswith("qwen2"), name=name)
    for name, sizes in _SIZES.items()
}
"""The models that :func:`memory_plan` knows by name."""

# Families whose block is the one described here: RMSNorm, rotary positions, SwiGLU.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def _from_config(config: Any, name: str) -> ModelShape:
    if not isinstance(config, Mapping):
        raise ValueError(f"{name} holds no JSON object, so it is no config.json of a model")
    family = config.get("model_type")
    if family not in _FAMILIES or "num_local_experts" in config or "num_experts" in config:
        raise ValueError(
            f"{name}: model_type={family!r} is not planned for; the known blocks are those of "
            f"{', '.join(_FAMILIES)}, without experts"
        )
    needed = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "hidden": "intermediate_size",
        "heads": "num_attention_heads",
        "vocabulary": "vocab_size",
    }
    missing = [key for key in needed.values() if key not in config]
    if missing:
        raise ValueError(f"{name}: {', '.join(missing)} is missing; a model's config.json has it")
    sizes = {field: config[key] for field, key in needed.items()}
    return ModelShape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or sizes["heads"],
        head_dim=config.get("head_dim"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", family == "qwen2")),
        name=name,
    )


def model_shape(model: Any) -> ModelShape:
    """A shape from a name, a path to a ``config.json``, its contents, or itself.

    Raises:
        ValueError: if it is none of these; the message lists the names.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return _from_config(model, "config")
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"model must be a name, a config.json or a ModelShape, got {type(model).__name__}"
        )
    path = pathlib.Path(model)
    if path.suffix == ".json" or path.is_dir():
        path = path / "config.json" if path.is_dir() else path
        try:
            return _from_config(json.loads(path.read_text()), str(path))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error})") from error
    return MODELS[choose("model", str(model), MODELS)]


def abstract_params(model: ModelShape, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Params:
    """The model's weights as shapes: nested dicts, layers stacked on a leading axis."""
    layers, width, hidden = model.layers, model.width, model.hidden

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    attention = {
        "q_proj": {"kernel": leaf(layers, width, model.query_width)},
        "k_proj": {"kernel": leaf(layers, width, model.key_width)},
        "v_proj": {"kernel": leaf(layers, width, model.key_width)},
        "o_proj": {"kernel": leaf(layers, model.query_width, width)},
    }
    if model.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name]["bias"] = leaf(layers, attention[name]["kernel"].shape[-1])
    params: dict[str, Any] = {
        "embed_tokens": {"embedding": leaf(model.vocabulary, width)},
        "layers": {
            "input_layernorm": {"scale": leaf(layers, width)},
            "mlp": {
                "down_proj": {"kernel": leaf(layers, hidden, width)},
                "gate_proj": {"kernel": leaf(layers, width, hidden)},
                "up_proj": {"kernel": leaf(layers, width, hidden)},
            },
            "post_attention_layernorm": {"scale": leaf(layers, width)},
            "self_attn": attention,
        },
        "norm": {"scale": leaf(width)},
    }
    if not model.tied:
        params["lm_head"] = {"kernel": leaf(width, model.vocabulary)}
    return params


def param_specs(params: Params) -> Params:
    """Partition specs for :func:`abstract_params` on mesh axes ``fsdp`` and ``tp``.

    Heads, the hidden axis and the vocabulary are split by ``tp``, the width by ``fsdp``.
    """
    into, out = PartitionSpec(None, "fsdp", "tp"), PartitionSpec(None, "tp", "fsdp")

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        names = [key.key for key in path]
        if names[-1] == "embedding":
            return PartitionSpec("tp", "fsdp")
        if "lm_head" in names:
            return PartitionSpec("fsdp", "tp")
        if names[-1] == "kernel":
            return out if names[-2] in ("o_proj", "down_proj") else into
        return PartitionSpec(None, "tp") if names[-1] == "bias" else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)
