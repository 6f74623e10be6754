"""Numbers in 8 or 16 bits, rounded at random so that averages keep moving.

A moment with decay 0.999 changes by a thousandth a step, which is less than the distance of two
8-bit (or bfloat16) numbers: rounded to the nearest it would never change again. Rounded at random,
up as often as it should, it is right on average.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.mesh import place_like

# Levels of an 8-bit code, and how many of them an octave has: 32 octaves either way.
_SIGNED, _UNSIGNED = (127, 4), (255, 8)


def _grid(dtype: jnp.dtype) -> tuple[int, int]:
    return _SIGNED if dtype == jnp.int8 else _UNSIGNED


def _magnitude(level: Array, dtype: jnp.dtype) -> Array:
    levels, per_octave = _grid(dtype)
    return jnp.where(level > 0, jnp.exp2((level - levels) / per_octave), 0.0)


def to_codes(
    x: Float[Array, "*rows n"], dtype: jnp.dtype, key: Array
) -> tuple[Array, Float[Array, "*rows 1"]]:
    """Logarithmic 8-bit codes, and one power of two for each row.

    Args:
        x: values; non-negative for ``uint8``.
        dtype: ``int8`` for a sign and 4 levels an octave, ``uint8`` for 8 levels an octave.
        key: PRNG key of the rounding.

    Returns:
        Codes of the shape of ``x``, and scales with a last axis of 1. What was encoded before is
        encoded as itself. A row with a NaN or an infinity has the scale NaN.
    """
    levels, per_octave = _grid(dtype)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # Powers of two move the levels onto themselves when a row's largest value changes.
    power = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(largest > 0, largest, 1))))
    scale = jnp.where(jnp.isfinite(largest), power, jnp.nan)
    share = jnp.abs(x) / scale
    place = jnp.floor(levels + per_octave * jnp.log2(jnp.maximum(share, 1e-37)))
    below = jnp.clip(place, 0, levels - 1)
    low, high = _magnitude(below, dtype), _magnitude(below + 1, dtype)
    chance = (share - low) / (high - low)
    draw = place_like(jax.random.uniform(key, x.shape, x.dtype), x)
    level = below + (draw < chance).astype(x.dtype)
    signed = level * jnp.sign(x) if dtype == jnp.int8 else level
    return signed.astype(dtype), scale


def from_codes(codes: Array, scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows n"]:
    """The values of :func:`to_codes`, in float32."""
    level = codes.astype(jnp.float32)
    return jnp.sign(level) * _magnitude(jnp.abs(level), codes.dtype) * scale


def to_bfloat16(x: Float[Array, "..."], key: Array) -> Array:
    """bfloat16, rounded up or down at random so that the mean is the value."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = place_like(jax.random.bits(key, x.shape, jnp.uint16), x).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Noise must not turn an infinity into a NaN or a NaN into a number.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
