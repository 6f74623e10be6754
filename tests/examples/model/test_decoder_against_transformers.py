"""Our decoder gives the logits of Hugging Face's Qwen2 and LLaMA for the same parameters."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from model.decoder import DecoderConfig, functional

torch = pytest.importorskip("torch", reason="compares with PyTorch")
transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's models")

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
}


def convert(state: dict, layers: int, tied: bool) -> dict:
    """Hugging Face's names and transposed, unstacked weights → ours."""
    arrays = {name.removeprefix("model."): tensor.numpy() for name, tensor in state.items()}
    params: dict = {
        "embed_tokens": {"embedding": arrays["embed_tokens.weight"]},
        "norm": {"scale": arrays["norm.weight"]},
        "layers": {},
    }
    if not tied:
        params["lm_head"] = {"kernel": arrays["lm_head.weight"].T}
    for name in arrays:
        if not name.startswith("layers.0."):
            continue
        *modules, kind = name.split(".")[2:]
        stacked = np.stack([arrays[name.replace(".0.", f".{i}.", 1)] for i in range(layers)])
        node = params["layers"]
        for module in modules:
            node = node.setdefault(module, {})
        if kind == "bias":
            node["bias"] = stacked
        elif stacked.ndim == 2:
            node["scale"] = stacked
        else:
            node["kernel"] = np.swapaxes(stacked, 1, 2)
    return params


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_logits(family, tied):
    torch.manual_seed(0)
    reference_config = getattr(transformers, f"{family}Config")(
        **SIZES, tie_word_embeddings=tied, attn_implementation="eager"
    )
    reference = getattr(transformers, f"{family}ForCausalLM")(reference_config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # norms and biases must not be trivial
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = DecoderConfig(**SIZES, tie_word_embeddings=tied, attention_bias=family == "Qwen2")
    _, apply = functional(config)
    params = convert(reference.state_dict(), config.num_hidden_layers, tied)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(apply(params, jnp.asarray(tokens)), expected, atol=2e-4, rtol=1e-4)
