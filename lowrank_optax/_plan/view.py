"""How one leaf is read as matrices.

A view splits the axes of a leaf into batch, reduction and output axes. Nothing is ever
reshaped: every product is a contraction over named axes, so a mesh may shard any of them.
"""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from lowrank_optax._arrays.contract import REFRESH_PRECISION, STEP_PRECISION, contract
from lowrank_optax._arrays.mesh import place

REDUCTION, OUTPUT = "reduction", "output"
BOTH = (REDUCTION, OUTPUT)


def other(side: str) -> str:
    """The opposite side of a matrix."""
    return OUTPUT if side == REDUCTION else REDUCTION


class Bases(NamedTuple):
    """The bases of one target; the side that is not projected holds None.

    Attributes:
        reduction: ``(*batch, *reduction, r)`` or None.
        output: ``(*batch, *output, r)`` or None.
    """

    reduction: Array | None = None
    output: Array | None = None

    @classmethod
    def of(cls, side: str, basis: Array) -> "Bases":
        """The bases of a target that has one on one side only."""
        return cls(**{side: basis})

    def on(self, side: str) -> Any:
        """The basis of one side, None where it has none."""
        return self.reduction if side == REDUCTION else self.output

    def only(self) -> Any:
        """The basis of the one side that has one."""
        (basis,) = (b for b in self if b is not None)
        return basis


@dataclasses.dataclass(frozen=True)
class View:
    """One leaf read as a batch of matrices ``(reduction, output)``.

    Attributes:
        shape: the leaf's shape.
        batch_axes: axes that index independent matrices (scanned layers, experts).
        reduction_axes: axes that the layer sums over, the input of ``x @ W``.
        output_axes: axes that the layer produces.
    """

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    output_axes: tuple[int, ...]

    def _sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in axes)

    def _labels(self, axes: Sequence[int]) -> str:
        return "".join(string.ascii_lowercase[axis] for axis in axes)

    @property
    def rows(self) -> int:
        """m, the size of the reduction side."""
        return math.prod(self._sizes(self.reduction_axes))

    @property
    def columns(self) -> int:
        """n, the size of the output side."""
        return math.prod(self._sizes(self.output_axes))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._sizes(self.batch_axes)

    def length(self, side: str) -> int:
        """The size of one side, the length of the columns of its basis."""
        return self.rows if side == REDUCTION else self.columns

    def side_axes(self, side: str) -> tuple[int, ...]:
        return self.reduction_axes if side == REDUCTION else self.output_axes

    def basis_shape(self, side: str, rank: int) -> tuple[int, ...]:
        """The shape of a basis of one side: ``(*batch, *side, rank)``."""
        return self.batch_shape + self._sizes(self.side_axes(side)) + (rank,)

    def core_shape(self, sides: Sequence[str], rank: int) -> tuple[int, ...]:
        """The shape of a core: each projected side is one axis of length ``rank``."""
        left = (rank,) if REDUCTION in sides else self._sizes(self.reduction_axes)
        right = (rank,) if OUTPUT in sides else self._sizes(self.output_axes)
        return self.batch_shape + left + right

    def core_axes(self, sides: Sequence[str]) -> dict[str, int]:
        """Where in a core each projected side's rank axis is."""
        first = len(self.batch_axes)
        after = 1 if REDUCTION in sides else len(self.reduction_axes)
        axes = {REDUCTION: first, OUTPUT: first + after}
        return {side: axes[side] for side in sides}

    def _core_labels(self, reduction: bool, output: bool) -> str:
        left = "y" if reduction else self._labels(self.reduction_axes)
        right = "z" if output else self._labels(self.output_axes)
        return self._labels(self.batch_axes) + left + right

    def project(
        self, matrix: Float[Array, "..."], bases: Bases, precision=STEP_PRECISION
    ) -> Float[Array, "..."]:
        """The core of a leaf-shaped array: ``PᵀG``, ``GQ`` or ``PᵀGQ``."""
        batch, labels = self._labels(self.batch_axes), self._labels(range(len(self.shape)))
        if bases.reduction is not None:
            reduced = self._core_labels(True, False)
            basis = batch + self._labels(self.reduction_axes) + "y"
            matrix = contract(
                f"{labels},{basis}->{reduced}", matrix, bases.reduction, precision=precision
            )
            labels = reduced
        if bases.output is not None:
            reduced = self._core_labels(bases.reduction is not None, True)
            basis = batch + self._labels(self.output_axes) + "z"
            matrix = contract(
                f"{labels},{basis}->{reduced}", matrix, bases.output, precision=precision
            )
        return matrix

    def lift(self, core: Float[Array, "..."], bases: Bases) -> Float[Array, "..."]:
        """The leaf-shaped array of a core: ``P C``, ``C Qᵀ`` or ``P C Qᵀ``."""
        batch, full = self._labels(self.batch_axes), self._labels(range(len(self.shape)))
        labels = self._core_labels(bases.reduction is not None, bases.output is not None)
        if bases.output is not None:
            basis = batch + self._labels(self.output_axes) + "z"
            # The last product writes the leaf's own axis order.
            target = full if bases.reduction is None else self._core_labels(True, False)
            core = contract(f"{labels},{basis}->{target}", core, bases.output)
            labels = target
        if bases.reduction is not None:
            basis = batch + self._labels(self.reduction_axes) + "y"
            core = contract(f"{basis},{labels}->{full}", bases.reduction, core)
        return core

    def spread(self, values: Float[Array, "..."], axes: Sequence[int]) -> Float[Array, "..."]:
        """An array over some of the leaf's axes, with axes of length 1 for the others.

        Args:
            values: one number for each index of ``axes``.
            axes: the leaf's axes that it has, in its order.

        Returns:
            An array that broadcasts against the leaf.
        """
        values = jnp.transpose(values, sorted(range(len(axes)), key=lambda i: axes[i]))
        return jnp.expand_dims(values, [a for a in range(len(self.shape)) if a not in axes])

    def images(
        self,
        matrix: Float[Array, "..."],
        side: str,
        directions: Float[Array, "..."],
        precision=REFRESH_PRECISION,
    ) -> Float[Array, "..."]:
        """``Gᵀ X`` for the reduction side, ``G X`` for the output side.

        Args:
            matrix: the leaf-shaped array G.
            side: the side that ``directions`` live on.
            directions: X, ``(*batch, *side, r)``.
            precision: precision of the product.

        Returns:
            ``(*batch, *other side, r)``.
        """
        batch, full = self._labels(self.batch_axes), self._labels(range(len(self.shape)))
        here, there = (self._labels(self.side_axes(s)) for s in (side, other(side)))
        return contract(
            f"{full},{batch}{here}y->{batch}{there}y",
            matrix,
            directions,
            precision=precision,
        )

    def basis_axes(self, side: str) -> tuple[int | None, ...]:
        """The axis of the leaf that each axis of a basis is; None for the rank axis."""
        return (*self.batch_axes, *self.side_axes(side), None)

    def core_leaf_axes(self, sides: Sequence[str]) -> tuple[int | None, ...]:
        """The axis of the leaf that each axis of a core is; None for rank axes."""
        left = (None,) if REDUCTION in sides else self.reduction_axes
        right = (None,) if OUTPUT in sides else self.output_axes
        return (*self.batch_axes, *left, *right)

    def place_basis(
        self, basis: Num[Array, "..."], side: str, leaf: Any, spreading: bool = False
    ) -> Array:
        """A basis on the mesh axes of its side of ``leaf``, its rank axis on every device.

        ``spreading`` uses the leaf's other mesh axes too, as in the state.
        """
        return place(basis, self.basis_axes(side), leaf, spreading)

    def place_core(
        self, core: Float[Array, "..."], sides: Sequence[str], leaf: Any, spreading: bool = False
    ) -> Array:
        """A core on the mesh axes of those sides of ``leaf`` that are not projected.

        ``spreading`` uses the leaf's other mesh axes too, as in the state.
        """
        return place(core, self.core_leaf_axes(sides), leaf, spreading)

    def as_matrix(self, leaf: Float[Array, "..."]) -> Float[Array, "*batch m n"]:
        """``(*batch, m, n)``, copied and flattened: for reference methods only."""
        order = self.batch_axes + self.reduction_axes + self.output_axes
        return leaf.transpose(order).reshape(*self.batch_shape, self.rows, self.columns)


def make_view(
    shape: Sequence[int], reduction_axis: int | Sequence[int], output_axis: int | Sequence[int]
) -> View:
    """Builds a view from axis numbers; axes named on neither side are batch axes.

    Args:
        shape: the leaf's shape.
        reduction_axis: one axis or several, negative numbers count from the end.
        output_axis: likewise.

    Returns:
        The view.

    Raises:
        ValueError: if an axis is out of range, named twice, or a side has none. The
            message starts with what is wrong; callers put the leaf's path before it.
    """

    def normalized(name: str, axes: int | Sequence[int]) -> tuple[int, ...]:
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not axes:
            raise ValueError(f"{name}=() names no axis of shape {tuple(shape)}; name at least one")
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{name}={axes} is out of range for shape {tuple(shape)} with "
                    f"{len(shape)} axes; use numbers from {-len(shape)} to {len(shape) - 1}"
                )
        return tuple(axis % len(shape) for axis in axes)

    reduction = normalized("reduction_axis", reduction_axis)
    output = normalized("output_axis", output_axis)
    named = reduction + output
    if len(set(named)) != len(named):
        raise ValueError(
            f"reduction_axis={reduction} and output_axis={output} overlap for shape "
            f"{tuple(shape)}; name each axis once, e.g. reduction_axis=0, output_axis=1"
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in named)
    return View(tuple(shape), batch, reduction, output)
