"""Weights whose gradient is only wanted inside a subspace.

A :class:`Factored` weight travels through a loss in place of the array. Where it meets an
operation with a rule here, that operation's backward pass produces the cores directly. Where it
meets any other, it is *materialised*: an identity on the weight whose backward pass
projects the full cotangent. Either way the gradient is exact.

For ``y = x W`` with a basis P on the reduction side,

    Pᵀ G = Pᵀ xᵀ δ = (x P)ᵀ δ

so two thin products replace one full one, and ``x P`` is saved for the backward pass instead
of ``x``. With a basis Q on the output side, ``G Q = xᵀ (δ Q)``.
"""

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax._arrays.contract import contract
from lowrank_optax._arrays.mesh import place_like

# Axes are named by the axis numbers of the parameter. An array axis may hold several of them,
# merged by a reshape, or none, if it has length 1.
Axes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ProductAxes:
    """The names of the axes of one product's arrays. Rank axes have negative names.

    Attributes:
        bases: for each basis the names of its axes; the last one is its rank axis.
        core: the names of the core's axes.
        moment_of: empty for a product of the gradient. Otherwise the axes of one side, of which
            what is wanted is ``xᵀ(x Ω)``: x is the operand that has these axes where the weight
            is used, the input of a product or the cotangent of its output.
    """

    bases: tuple[tuple[int, ...], ...]
    core: tuple[int, ...]
    moment_of: tuple[int, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """One wanted product of the gradient with one basis, or with one on each side.

    Attributes:
        bases: the arrays.
        core: zeros of the core's shape; the backward pass gives this the product as its
            cotangent.
        axes: the names of all axes.
    """

    # JAX puts placeholders and None in the place of arrays.
    bases: tuple[Any, ...]
    core: Any
    axes: ProductAxes = dataclasses.field(metadata={"static": True})

    def sides(self) -> list[frozenset[int]]:
        """The axes that each basis contracts."""
        if self.axes.moment_of:
            return [frozenset(self.axes.moment_of)]
        kept = frozenset(self.axes.core)
        return [frozenset(axes) - kept for axes in self.axes.bases]

    def names_after(self, names: tuple[int, ...], number: int) -> tuple[int, ...]:
        """The axes that an array with these has once it is contracted with one of the bases."""
        axes, side = self.axes.bases[number], self.sides()[number]
        # Batch axes of the basis that the array lacks come in with the basis.
        return tuple(n for n in names if n not in side) + tuple(
            n for n in axes if n not in side and n not in names
        )

    def select(self, axis: int, take: Any) -> "Product":
        """Applies ``take`` along one batch axis of every array, dropping its name."""
        bases, names = [], []
        for basis, axes in zip(self.bases, self.axes.bases, strict=True):
            bases.append(take(basis, axes.index(axis)))
            names.append(tuple(a for a in axes if a != axis))
        core = take(self.core, self.axes.core.index(axis))
        core_axes = tuple(a for a in self.axes.core if a != axis)
        axes = dataclasses.replace(self.axes, bases=tuple(names), core=core_axes)
        return Product(tuple(bases), core, axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factored:
    """A weight, and the products of its gradient that are wanted.

    Attributes:
        weight: the array, perhaps cast, transposed or sliced since.
        products: what is wanted.
        axes: the parameter axes behind each axis of ``weight``.
        sizes: the length of every parameter axis, by number.
        path: the parameter's name, for reports.
    """

    weight: Any
    products: tuple[Any, ...]
    axes: Axes = dataclasses.field(metadata={"static": True})
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})

    def with_weight(self, weight: Array, axes: Axes | None = None) -> "Factored":
        """The same weight in another dtype or axis order."""
        return dataclasses.replace(self, weight=weight, axes=self.axes if axes is None else axes)

    def batch_axis(self, position: int) -> int | None:
        """The parameter axis at a position of ``weight`` if it is one batch axis, else None."""
        names = self.axes[position]
        if len(names) != 1:
            return None
        for product in self.products:
            if any(names[0] in side for side in product.sides()):
                return None
            # The other side's axes are in the core but in no basis.
            if not all(names[0] in axes for axes in product.axes.bases):
                return None
        return names[0]

    def select(self, position: int, weight: Array, take: Any) -> "Factored":
        """One slice along a batch axis; ``weight`` is that of the original already."""
        (axis,) = self.axes[position]
        axes = self.axes[:position] + self.axes[position + 1 :]
        products = tuple(product.select(axis, take) for product in self.products)
        return dataclasses.replace(self, weight=weight, products=products, axes=axes)


def letters(names: Sequence[int]) -> str:
    """Einsum labels: parameter axes from a, other axes from the end of the alphabet."""
    return "".join(string.ascii_letters[name] for name in names)


# Rank axes (-1, -2) and the free axes of the other operand have names that no parameter axis has.
FREE = 20


def ungroup(x: Array, axes: Sequence[tuple[int, ...]], sizes: dict[int, int]) -> Array:
    """Splits merged axes and drops nameless ones: one array axis for each name."""
    names = [name for group in axes for name in group]
    return x.reshape([sizes[name] for name in names]) if len(names) != x.ndim else x


def flat_axes(axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(name for group in axes for name in group)


def apply_bases(
    x: Array, names: tuple[int, ...], product: Product, which: Sequence[int]
) -> tuple[Array, tuple[int, ...]]:
    """Contracts some of a product's bases with an array."""
    for number in which:
        basis, axes = product.bases[number], product.axes.bases[number]
        result = product.names_after(names, number)
        x = contract(f"{letters(names)},{letters(axes)}->{letters(result)}", x, basis)
        names = result
    return x, names


def moment(x: Array, names: tuple[int, ...], product: Product) -> Array:
    """``xᵀ(x Ω)`` for an operand that has the side's axes."""
    thin, thin_names = apply_bases(x, names, product, [0])
    core = letters(product.axes.core)
    return contract(f"{letters(names)},{letters(thin_names)}->{core}", x, thin)


def _project(x: Array, names: tuple[int, ...], product: Product) -> Array:
    """The core of an array that has all the weight's axes."""
    x, names = apply_bases(x, names, product, range(len(product.bases)))
    return jnp.einsum(f"{letters(names)}->{letters(product.axes.core)}", x)


def materialise(factored: Factored) -> Array:
    """The weight as an array; its cotangent is projected."""
    sizes = dict(enumerate(factored.sizes))

    @jax.custom_vjp
    def identity(weight, products):
        del products
        return weight

    def forward(weight, products):
        return weight, products

    def backward(products, cotangent):
        full = ungroup(cotangent, factored.axes, sizes)
        cores = [_project(full, flat_axes(factored.axes), product) for product in products]
        return None, cotangents(products, cores)

    identity.defvjp(forward, backward)
    return identity(factored.weight, factored.products)


def cotangents(products: Sequence[Product], cores: Sequence[Array]) -> tuple[Product, ...]:
    """The cotangent of ``products``: cores in the place of cores, nothing for the bases."""
    return tuple(
        Product((None,) * len(p.bases), place_like(core.astype(p.core.dtype), p.core), p.axes)
        for p, core in zip(products, cores, strict=True)
    )
