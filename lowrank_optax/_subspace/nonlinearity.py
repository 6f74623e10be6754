r"""What may stand between the encoder and the decoder: :math:`\tilde G = U\,\varphi(V^T G)`.

A *channel* is one column of the encoder: a row of a core ``VᵀG``, a column of ``GV``; of a
two-sided core a row. Channels of a gradient differ in size by orders of magnitude, so whatever
has a threshold has one for each.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import wide_dtype
from lowrank_optax._arrays.norms import unit
from lowrank_optax._plan.view import View

# In units of a channel's RMS; of Gaussian entries one in 370 is larger.
SOFT_CLIP_LIMIT = 3.0


class Nonlinearity(NamedTuple):
    """A function of a core.

    Attributes:
        name: what ``nonlinearity=`` calls it.
        apply: from the view, the projected sides, the core and the leaf-shaped gradient to a
            core of the same shape.
        needs_gradient: whether it reads the gradient, which is None where it never existed.
    """

    name: str
    apply: Callable[[View, Sequence[str], Array, Array | None], Array]
    needs_gradient: bool = False


def _mean_squares(core: Array, view: View, sides: Sequence[str]) -> Array:
    """The mean square of each channel, with axes of length 1 where it was averaged."""
    channel = min(view.core_axes(sides).values())
    axes = tuple(a for a in range(len(view.batch_axes), core.ndim) if a != channel)
    return jnp.mean(jnp.square(core), axis=axes, keepdims=True)


def soft_clip(
    view: View, sides: Sequence[str], core: Float[Array, "..."], gradient: Array | None = None
) -> Float[Array, "..."]:
    r"""``s tanh(x / s)`` with s three times the RMS of the channel that x is in.

    Odd, so zero stays zero and no sign changes; nearly the identity for entries of ordinary
    size, and no entry leaves larger than s.
    """
    del gradient
    scale = unit(core)
    limit = SOFT_CLIP_LIMIT * jnp.sqrt(_mean_squares(core / scale, view, sides)) * scale
    return jnp.where(limit > 0, limit * jnp.tanh(core / jnp.where(limit > 0, limit, 1)), 0)


def wiener(
    view: View, sides: Sequence[str], core: Float[Array, "..."], gradient: Array | None
) -> Float[Array, "..."]:
    r"""Each channel times :math:`\sigma(\log\mathrm{snr}) = \mathrm{snr} / (1 + \mathrm{snr})`.

    What the subspace leaves out says how strong noise is that no direction is free of: its mean
    square, :math:`\nu = (\|G\|^2 - \|C\|^2) / (mn - |C|)`. A channel with mean square p then has
    :math:`\mathrm{snr} = \max(p - \nu, 0) / \nu`, and its gate is :math:`\max(1 - \nu/p, 0)`.
    """
    assert gradient is not None
    wide = gradient.astype(wide_dtype(gradient, core))
    scale = unit(wide)
    g, c = wide / scale, core.astype(wide.dtype) / scale
    batch = len(view.batch_axes)
    whole = jnp.sum(jnp.square(g), axis=view.reduction_axes + view.output_axes)
    inside = jnp.sum(jnp.square(c), axis=tuple(range(batch, c.ndim)))
    outside = view.rows * view.columns - core.size // max(1, whole.size)
    noise = jnp.maximum(whole - inside, 0) / outside
    noise = noise.reshape(noise.shape + (1,) * (core.ndim - batch))
    power = _mean_squares(c, view, sides)
    gate = jnp.maximum(1 - noise / jnp.where(power > 0, power, 1), 0)
    return core * jnp.where(power > 0, gate, 0).astype(core.dtype)


def sigmoid(
    view: View, sides: Sequence[str], core: Float[Array, "..."], gradient: Array | None = None
) -> Float[Array, "..."]:
    r"""The logistic function of each entry, as LoGRA's description writes it.

    It forgets signs, saturates, and a zero gradient gives the update :math:`U \tfrac12`.
    """
    del view, sides, gradient
    return jax.nn.sigmoid(core)


NONLINEARITIES: dict[str, Nonlinearity | None] = {
    "identity": None,
    "soft_clip": Nonlinearity("soft_clip", soft_clip),
    "wiener": Nonlinearity("wiener", wiener, needs_gradient=True),
    "sigmoid": Nonlinearity("sigmoid", sigmoid),
}
