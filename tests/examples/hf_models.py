"""Tiny, randomly initialised Hugging Face models with a tokenizer, made without a network."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<unk>", "<eos>", "<im_start>", "<im_end>"]
WORDS = [*map(str, range(20)), "plus", "is", "what", "?", "be", "brief", "\n"]
WORDS += ["user", "assistant", "system"]
VOCABULARY = {word: index for index, word in enumerate(SPECIAL + WORDS)}
TEMPLATE = (
    "{% for m in messages %}<im_start>{{ m['role'] }}\n{{ m['content'] }}<im_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "Qwen3": {"head_dim": 16},
    "Llama": {"rope_parameters": LLAMA3},
}


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Words between spaces, a chat template, no beginning-of-text token."""
    words = tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    split = tokenizers.pre_tokenizers.Split
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [split("\n", "isolated"), split(" ", "removed")]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
    )
    wrapped.chat_template = template
    return wrapped


def make_model(directory: pathlib.Path, family: str, tied: bool = False) -> None:
    """Saves a model in several shards, with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES, **FAMILIES[family], tie_word_embeddings=tied
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases must not be trivial
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size="10KB")
    make_tokenizer().save_pretrained(directory)


def logits_of(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """What transformers makes of a checkpoint directory, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def write_chat(path: pathlib.Path, number: int = 24) -> None:
    """Sums of two digits as conversations."""
    digits = np.random.default_rng(0).integers(0, 10, (number, 2))
    lines = []
    for a, b in digits.tolist():
        question = {"role": "user", "content": f"what is {a} plus {b} ?"}
        answer = {"role": "assistant", "content": str(a + b)}
        lines.append(json.dumps({"messages": [question, answer]}))
    path.write_text("\n".join(lines) + "\n")
