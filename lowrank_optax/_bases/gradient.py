"""The gradient of a target: one noun, whether it exists or a backward pass made its core alone."""

from typing import NamedTuple

from jaxtyping import Array, Float

from lowrank_optax._arrays.compact import Compact
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import Bases


class Gradient(NamedTuple):
    """The gradient of one target.

    Attributes:
        projection: the target.
        value: the leaf-shaped array, or what a compact backward pass left of it.
    """

    projection: Projection
    value: Array | Compact

    @property
    def is_full(self) -> bool:
        """Whether the leaf-shaped array exists."""
        return not isinstance(self.value, Compact)

    def full(self, reader: str, advice: str = "") -> Float[Array, "..."]:
        """The leaf-shaped array.

        Args:
            reader: who needs it, for the message.
            advice: what else to do than to compute full gradients.

        Raises:
            ValueError: if it never existed.
        """
        if isinstance(self.value, Compact):
            raise ValueError(
                f"{self.projection.path!r}: {reader} needs the full gradient, got a compact one; "
                f"use jax.value_and_grad in place of compact_value_and_grad{advice}"
            )
        return self.value

    def core(self, bases: Bases) -> Float[Array, "..."]:
        """The gradient in the subspace of some bases, which a compact one was made with.

        Raises:
            ValueError: if a compact gradient was made with bases of another rank.
        """
        if not isinstance(self.value, Compact):
            return self.projection.view.project(self.value, bases)
        if self.value.core.shape != self.projection.core_shape:
            raise ValueError(
                f"{self.projection.path!r}: got a compact gradient of shape "
                f"{self.value.core.shape}, expected {self.projection.core_shape}; compute "
                "gradients with the opt_state that you update"
            )
        return self.value.core
