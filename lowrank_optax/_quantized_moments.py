"""Moments in 8 or 16 bits, of any optimizer: ``quantized_moments``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowrank_optax import _moments, _target
from lowrank_optax._quantize import from_codes, to_bfloat16, to_codes


class QuantizedState(NamedTuple):
    """State of :func:`quantized_moments`.

    Attributes:
        quantized_count: int32 scalar, updates so far.
        codes: the optimizer's state with its large moments in few bits.
        scales: for each leaf of it the scales of its rows, or 1.
    """

    quantized_count: jax.Array
    codes: Any
    scales: Any

    def opened(self) -> Any:
        """The optimizer's state in float32."""

        def one(code, scale):
            if code.dtype in (jnp.int8, jnp.uint8):
                return from_codes(code, scale)
            return code.astype(jnp.float32) if code.dtype == jnp.bfloat16 else code

        return jax.tree.map(one, self.codes, self.scales)

    def closed(self, opened: Any) -> "QuantizedState":
        """This state with other values, stored as these are."""
        dtypes = [code.dtype for code in jax.tree.leaves(self.codes)]
        return _closed(opened, dtypes, self.quantized_count, 1)


def _closed(opened: Any, dtypes: Sequence[Any], count: jax.Array, draw: int) -> QuantizedState:
    leaves, treedef = jax.tree.flatten(opened)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), draw)
    codes, scales = [], []
    for number, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        scale = jnp.ones([], jnp.float32)
        if dtype in (jnp.int8, jnp.uint8):
            here = jax.random.fold_in(key, number)
            leaf, scale = to_codes(leaf.astype(jnp.float32), jnp.dtype(dtype), here)
        elif dtype == jnp.bfloat16:
            leaf = to_bfloat16(leaf.astype(jnp.float32), jax.random.fold_in(key, number))
        codes.append(leaf)
        scales.append(scale)
    unflatten = jax.tree.unflatten
    return QuantizedState(count, unflatten(treedef, codes), unflatten(treedef, scales))


def _roles(state: Any) -> list[Any]:
    """For each leaf its role as a moment, a string, or the leaf itself."""

    def named(node):
        roles = _moments.field_roles(node)
        return node._replace(
            **{
                field: jax.tree.map(lambda _, role=role: role, getattr(node, field))
                for field, role in roles.items()
            }
        )

    return jax.tree.leaves(_moments.map_moments(named, state))


def quantized_moments(
    optimizer: optax.GradientTransformation, dtype: Any = jnp.int8, *, smallest: int = 4096
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the moments of any optimizer in 8 or 16 bits between steps.

    The optimizer itself computes in float32. Moments are found by the names of its state's fields,
    as :func:`galore_project` finds them, which also carries them over to new bases:
    ``galore_project(quantized_moments(optax.adam(1e-3)))``.

    An 8-bit moment has a logarithmic scale of 32 octaves below a power of two that each row (the
    last axis) has of its own: first moments a sign and 4 levels an octave, second moments 8 levels.
    Rounding is random, from the step count, so that averages are right in the mean; rounded to
    the nearest, a second moment with decay 0.999 would stop changing.

    Args:
        optimizer: any optax optimizer.
        dtype: ``jnp.int8`` for 8 bits, or ``jnp.bfloat16``.
        smallest: leaves with fewer elements stay as they are.

    Returns:
        A gradient transformation with extra arguments; its state is a :class:`QuantizedState`.

    Raises:
        ValueError: if ``dtype`` is neither, or ``smallest`` below 64.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.quantized_moments(optax.adam(1e-3))
        >>> params = {"kernel": jnp.ones((64, 128))}
        >>> state = tx.init(params)
        >>> optax.tree.get(state.codes, "nu")["kernel"].dtype
        dtype('uint8')
        >>> updates, state = tx.update(params, state, params)

    References:
        Dettmers et al., `8-bit Optimizers via Block-wise Quantization
        <https://arxiv.org/abs/2110.02861>`_, 2021
    """
    dtype = jnp.dtype(dtype)
    choices = [jnp.dtype(d).name for d in (jnp.int8, jnp.bfloat16)]
    _target.check_choice("quantized_moments: dtype", dtype.name, choices)
    if smallest < 64:
        raise ValueError(
            f"quantized_moments: smallest={smallest} must be at least 64: scales of smaller leaves "
            "would outweigh what they save"
        )
    inner = optax.with_extra_args_support(optimizer)

    def stored_dtype(leaf, role):
        moment = isinstance(role, str) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not moment or leaf.size < smallest:
            return leaf.dtype
        if dtype == jnp.bfloat16:
            return dtype
        return jnp.dtype(jnp.int8 if role == "first" else jnp.uint8)

    def init_fn(params: Any) -> Any:
        state = inner.init(params)
        leaves = jax.tree.leaves(state)
        dtypes = [stored_dtype(*pair) for pair in zip(leaves, _roles(state), strict=True)]
        return _closed(state, dtypes, jnp.zeros([], jnp.int32), 0)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        updates, opened = inner.update(updates, state.opened(), params, **extra_args)
        count: Any = optax.safe_increment(state.quantized_count)
        dtypes = [code.dtype for code in jax.tree.leaves(state.codes)]
        return updates, _closed(opened, dtypes, count, 0)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
