"""A Hugging Face ``config.json`` as the shape of our decoder, and models by name."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from model.config import DecoderConfig
from model.rotary import RopeScaling
from running.errors import UserError, one_line

ARCHITECTURES = {"qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "llama": "LLaMA 2 and 3"}
"""What the decoder can be, by ``model_type``."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*"]


def find_model(name: str) -> pathlib.Path:
    """A checkpoint directory, or one that is downloaded by its name on the Hugging Face Hub.

    Args:
        name: a path, or ``"organisation/model"``.

    Returns:
        The directory.

    Raises:
        UserError: if there is no such directory and no such model, or no connection.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"--model {name} is a file: name the directory that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise UserError(
            f"--model {name} is no directory: name one that holds config.json and safetensors "
            "files, or organisation/model on the Hugging Face Hub"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"--model {name} is no directory, and to download it needs huggingface_hub: "
            "pip install 'lowrank-optax[llm]'"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the client's own, its HTTP library's and the system's
        raise UserError(
            f"--model {name} is no directory and cannot be downloaded "
            f"({one_line(error)[:200]}): check the name, the connection and, for gated models, "
            "`hf auth login`"
        ) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: if there is none.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(
            f"'{path}' is missing: name the directory of a Hugging Face checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' holds {type(content).__name__}, expected a JSON object")
    return content


def read_config(directory: pathlib.Path, **changes: Any) -> DecoderConfig:
    """The shape of the model in a checkpoint directory.

    Args:
        directory: with a ``config.json``.
        **changes: fields of `DecoderConfig` that are not the checkpoint's business.

    Returns:
        The config.

    Raises:
        UserError: if the file is missing or damaged, or describes what the decoder cannot be.
    """
    path = directory / "config.json"
    content = read_json(path)
    kind = content.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"'{path}' has model_type={kind!r}: the decoder can be one of "
            + ", ".join(f"{key!r} ({value})" for key, value in ARCHITECTURES.items())
        )
    missing = [name for name in _SIZES if content.get(name) is None]
    if missing:
        raise UserError(f"'{path}' lacks {', '.join(missing)}: it must be a complete config")
    _check(path, content)
    theta, scaling = _rope(path, content)
    fields = {
        **{name: content[name] for name in _SIZES},
        "num_key_value_heads": content.get("num_key_value_heads") or content["num_attention_heads"],
        "head_dim": content.get("head_dim") or (128 if kind == "qwen3" else None),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": content.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": content.get("tie_word_embeddings", False),
        "attention_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
    }
    try:
        return DecoderConfig(**(fields | changes))
    except (ValueError, TypeError) as error:
        raise UserError(f"'{path}' describes an impossible model: {one_line(error)}") from error


def _check(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Refuses what the decoder would silently compute otherwise."""
    unsupported = {
        "hidden_act": content.get("hidden_act", "silu") != "silu",
        "use_sliding_window": content.get("use_sliding_window", False),
        "mlp_bias": content.get("mlp_bias", False),
        # A fourth bias, on the output projection, in these two; Qwen2 always has three.
        "attention_bias": content["model_type"] != "qwen2" and content.get("attention_bias", False),
        "partial_rotary_factor": content.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name, wrong in unsupported.items():
        if wrong:
            raise UserError(
                f"'{path}' has {name}={content[name]!r}, which the decoder does not implement: "
                "choose a model without it"
            )
    if content.get("quantization_config"):
        raise UserError(
            f"'{path}' has a quantization_config: full-parameter training needs the weights "
            "themselves, name the checkpoint that was not quantised"
        )


def _rope(path: pathlib.Path, content: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the stretching of rotary frequencies, as old and new transformers write them."""
    scaling = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or content.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(
            f"'{path}' has rope_type={kind!r}: the decoder implements 'default' and 'llama3'"
        )
    try:
        return theta, RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(
                scaling.get("original_max_position_embeddings")
                or content["max_position_embeddings"]
            ),
        )
    except KeyError as error:
        raise UserError(f"'{path}' lacks {error} of the llama3 rope scaling") from error
    except ValueError as error:
        raise UserError(f"'{path}': rope scaling: {error}") from error
