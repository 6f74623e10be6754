"""LoRA: a frozen kernel with a trained low-rank product beside it, ``y = xW + (α/r)·(xA)B``.

Which projections are adapted is part of a `DecoderConfig`. Adapters stand beside the kernel,
``{"kernel": W, "lora_a": A, "lora_b": B}``; everything else is trained as ever. `split` takes the
frozen kernels out of the parameters, so that they get no gradient and no optimizer state, and
`merge` folds the products into the kernels, for a model without adapters.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Params = dict[str, Any]

PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""The groups that an option may name in place of single projections."""

Ranks = tuple[tuple[str, int], ...]
"""Ranks by the name of a projection."""


def parse_ranks(texts: list[str]) -> Ranks:
    """Reads ``["attention=8", "down_proj=16"]``.

    Args:
        texts: groups or single projections, each with a rank.

    Returns:
        The rank of each projection named, sorted by name.

    Raises:
        ValueError: if a name is unknown or comes twice, or a rank is not a positive integer.
    """
    ranks: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", text)
        single = {name for names in PROJECTIONS.values() for name in names}
        if not match or match[1] not in PROJECTIONS.keys() | single:
            raise ValueError(
                f"{text} is not NAME=RANK, where NAME is one of "
                f"{', '.join([*PROJECTIONS, *sorted(single)])}"
            )
        for name in PROJECTIONS.get(match[1], (match[1],)):
            if name in ranks:
                raise ValueError(f"{text} gives {name} a rank a second time: name it once")
            ranks[name] = int(match[2])
    return tuple(sorted(ranks.items()))


class LoraLinear(nnx.Module):
    """A linear layer of which the adapters start out as zero.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        rank: columns of ``lora_a``.
        alpha: the product is scaled by ``alpha / rank``.
        dtype: what it computes in.
        param_dtype: what the parameters are stored in.
        use_bias: whether there is a bias, trained.
        rngs: random streams.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rank: int,
        alpha: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        use_bias: bool,
        rngs: nnx.Rngs,
    ):
        scaled = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(scaled(rngs.params(), (inputs, outputs), param_dtype))
        self.lora_a = nnx.Param(scaled(rngs.params(), (inputs, rank), param_dtype))
        self.lora_b = nnx.Param(jnp.zeros((rank, outputs), param_dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), param_dtype)) if use_bias else None
        self.scale = alpha / rank
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps the last axis."""

        def as_dtype(param: Any) -> jax.Array:
            return param.get_value().astype(self.dtype)

        x = x.astype(self.dtype)
        kernel = dense(self.kernel.get_value())
        y = x @ kernel.astype(self.dtype)
        low = (x @ as_dtype(self.lora_a)) @ as_dtype(self.lora_b)
        y += jnp.asarray(self.scale, self.dtype) * low
        if self.bias is not None:
            y += jnp.expand_dims(as_dtype(self.bias), range(y.ndim - 1))
        return y


def require_qwix() -> Any:
    """The library that quantises.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import qwix
    except ImportError as error:
        raise ImportError("--quantize needs qwix: pip install 'lowrank-optax[qwix]'") from error
    return qwix


def dense(kernel: Any) -> jax.Array:
    """A kernel as an array, whether or not `quantize` was applied to it."""
    if isinstance(kernel, jax.Array):
        return kernel
    return require_qwix().dequantize(kernel)


def quantize(frozen: Params, qtype: str, tile: int = 64) -> Params:
    """Frozen kernels in few bits, one scale for each output and ``tile`` inputs.

    A layer is widened when it is its turn in the scan, so that one layer's kernels at most exist
    in full.

    Args:
        frozen: from `split`: kernels of shape ``(layers, in, out)``.
        qtype: a type of qwix: ``"int8"``, ``"int4"``, ``"nf4"``.
        tile: how many inputs share a scale. Where it does not divide them, all share one.

    Returns:
        A tree of the same paths with a ``qwix.QArray`` for each kernel.

    Raises:
        ImportError: if qwix is not installed.
    """
    qwix = require_qwix()

    @jax.jit
    def one(kernel: jax.Array) -> Any:
        size = tile if kernel.shape[1] % tile == 0 else kernel.shape[1]
        return qwix.quantize(kernel, qtype, channelwise_axes=(0, 2), tiled_axes={1: size})

    return jax.tree.map(one, frozen)


def _walk(params: Params, visit: Callable[[Params], Params]) -> Params:
    """Applies ``visit`` to every innermost module, a dict without dicts in it."""
    if not any(isinstance(value, dict) for value in params.values()):
        return visit(params)
    return {
        name: _walk(value, visit) if isinstance(value, dict) else value
        for name, value in params.items()
    }


def _prune(params: Params) -> Params:
    pruned = {
        name: _prune(value) if isinstance(value, dict) else value for name, value in params.items()
    }
    return {name: value for name, value in pruned.items() if not isinstance(value, dict) or value}


def split(params: Params) -> tuple[Params, Params]:
    """Parameters as those that are trained, and the kernels that adapters stand beside.

    Args:
        params: of a decoder.

    Returns:
        Two trees of which `join` makes the whole. The second is empty without adapters.
    """

    def trained(module: Params) -> Params:
        kept = dict(module)
        if "lora_a" in module:
            kept.pop("kernel", None)
        return kept

    def frozen(module: Params) -> Params:
        return {"kernel": module["kernel"]} if {"lora_a", "kernel"} <= module.keys() else {}

    return _walk(params, trained), _prune(_walk(params, frozen))


def join(trained: Params, frozen: Params) -> Params:
    """The inverse of `split`."""
    joined = dict(trained)
    for name, value in frozen.items():
        joined[name] = join(joined[name], value) if isinstance(value, dict) else value
    return joined


def label(trained: Params) -> Params:
    """For ``optax.partition``: ``"lora"`` at the adapters, ``"rest"`` at all other parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "lora" if path[-1].key in ("lora_a", "lora_b") else "rest", trained
    )


def merge(params: Params, alpha: float) -> Params:
    """A model without adapters that computes the same.

    Args:
        params: of a decoder with adapters; kernels may be quantised.
        alpha: as in the decoder's config.

    Returns:
        The parameters of the decoder without adapters. Sums are made in float32 and stored in
        the type of the adapters.
    """

    @jax.jit
    def fold(kernel: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        wide = [x.astype(jnp.float32) for x in (a, b)]
        product = jnp.matmul(*wide) * (alpha / a.shape[-1])
        return (dense(kernel).astype(jnp.float32) + product).astype(a.dtype)

    def visit(module: Params) -> Params:
        if "lora_a" not in module:
            return module
        rest = {name: x for name, x in module.items() if name not in ("lora_a", "lora_b")}
        return rest | {"kernel": fold(module["kernel"], module["lora_a"], module["lora_b"])}

    return _walk(params, visit)
