"""Rotary positions, with the frequencies of LLaMA 3's longer contexts."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How LLaMA 3.1 and later stretch the rotary frequencies (``rope_type="llama3"``).

    Wavelengths beyond ``original_max_position_embeddings / low_freq_factor`` become ``factor``
    times as long, those below ``original_max_position_embeddings / high_freq_factor`` stay, and
    what lies between is interpolated.

    Attributes:
        factor: how much longer the longest wavelengths get.
        low_freq_factor: where the full factor begins.
        high_freq_factor: where no factor ends.
        original_max_position_embeddings: the context length before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor={self.factor} must be at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be positive and below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def __call__(self, frequencies: jax.Array) -> jax.Array:
        """The stretched frequencies, in radians a position."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotary_tables(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of shape ``(batch, length, 1, head_dim / 2)`` for ``(batch, length)``."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = jnp.reshape(theta**-exponents, (1, 1, 1, -1))
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns channel ``i`` together with channel ``i + head_dim / 2`` (HF's ``rotate_half``).

    Args:
        x: queries or keys, ``(batch, length, heads, head_dim)``.
        tables: from `rotary_tables`.

    Returns:
        The rotated array, in the type of ``x``.
    """
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
