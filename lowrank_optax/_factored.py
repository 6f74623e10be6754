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
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax._contract import contract

# Axes are named by the axis numbers of the parameter. An array axis may hold several of them,
# merged by a reshape, or none, if it has length 1.
Axes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ProductAxes:
    """The names of the axes of one product's arrays. Rank axes have negative names.

    Attributes:
        bases: for each basis the names of its axes; the last one is its rank axis.
        core: the names of the core's axes.
    """

    bases: tuple[tuple[int, ...], ...]
    core: tuple[int, ...]


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
        kept = frozenset(self.axes.core)
        return [frozenset(axes) - kept for axes in self.axes.bases]

    def select(self, axis: int, take: Any) -> "Product":
        """Applies ``take`` along one batch axis of every array, dropping its name."""
        bases, names = [], []
        for basis, axes in zip(self.bases, self.axes.bases, strict=True):
            bases.append(take(basis, axes.index(axis)))
            names.append(tuple(a for a in axes if a != axis))
        core = take(self.core, self.axes.core.index(axis))
        core_axes = tuple(a for a in self.axes.core if a != axis)
        return Product(tuple(bases), core, ProductAxes(tuple(names), core_axes))


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


def _letters(names: Sequence[int]) -> str:
    """Einsum labels: parameter axes from a, other axes from the end of the alphabet."""
    return "".join(string.ascii_letters[name] for name in names)


# Rank axes (-1, -2) and the free axes of the other operand have names that no parameter axis has.
_FREE = 20


def _ungroup(x: Array, axes: Sequence[tuple[int, ...]], sizes: dict[int, int]) -> Array:
    """Splits merged axes and drops nameless ones: one array axis for each name."""
    names = [name for group in axes for name in group]
    return x.reshape([sizes[name] for name in names]) if len(names) != x.ndim else x


def _flat(axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(name for group in axes for name in group)


def _apply_bases(
    x: Array, names: tuple[int, ...], product: Product, which: Sequence[int]
) -> tuple[Array, tuple[int, ...]]:
    """Contracts some of a product's bases with an array."""
    for number in which:
        basis, axes = product.bases[number], product.axes.bases[number]
        side = product.sides()[number]
        # Batch axes of the basis that the array lacks come in with the basis.
        result = tuple(n for n in names if n not in side) + tuple(
            n for n in axes if n not in side and n not in names
        )
        x = contract(f"{_letters(names)},{_letters(axes)}->{_letters(result)}", x, basis)
        names = result
    return x, names


def _project(x: Array, names: tuple[int, ...], product: Product) -> Array:
    """The core of an array that has all the weight's axes."""
    x, names = _apply_bases(x, names, product, range(len(product.bases)))
    return jnp.einsum(f"{_letters(names)}->{_letters(product.axes.core)}", x)


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
        full = _ungroup(cotangent, factored.axes, sizes)
        cores = [_project(full, _flat(factored.axes), product) for product in products]
        return None, _cotangents(products, cores)

    identity.defvjp(forward, backward)
    return identity(factored.weight, factored.products)


def _cotangents(products: Sequence[Product], cores: Sequence[Array]) -> tuple[Product, ...]:
    """The cotangent of ``products``: cores in the place of cores, nothing for the bases."""
    return tuple(
        Product((None,) * len(p.bases), core.astype(p.core.dtype), p.axes)
        for p, core in zip(products, cores, strict=True)
    )


def can_dot(factored: Factored, contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether a ``dot_general`` over these axes of the weight has a compact backward pass.

    Each basis must contract axes that are all summed over by the product, or all free.
    """
    summed = frozenset(_flat([factored.axes[i] for i in contracted]))
    batched = frozenset(_flat([factored.axes[i] for i in batch]))
    free = frozenset(_flat(factored.axes)) - summed - batched
    return all(
        side <= summed or side <= free for product in factored.products for side in product.sides()
    )


def dot(
    x: Array,
    factored: Factored,
    dimension_numbers: Any,
    weight_first: bool,
    out_type: dict[str, Any],
) -> Array:
    """``lax.dot_general`` of an array and a factored weight.

    Args:
        x: the other operand.
        factored: the weight.
        dimension_numbers: as ``dot_general`` takes them.
        weight_first: whether the weight is the left operand.
        out_type: the other parameters of ``dot_general``.

    Returns:
        The product; differentiating it gives the cores of ``factored``.
    """
    contracting, batching = dimension_numbers
    here, there = (0, 1) if weight_first else (1, 0)
    weight_axes = factored.axes
    sizes = dict(enumerate(factored.sizes))

    # Name the axes of x: those that it shares with the weight have the weight's names.
    x_axes: list[tuple[int, ...]] = [()] * x.ndim
    for pairs in (contracting, batching):
        for own, other in zip(pairs[here], pairs[there], strict=True):
            x_axes[other] = weight_axes[own]
    free = [i for i in range(x.ndim) if i not in (*contracting[there], *batching[there])]
    for number, axis in enumerate(free):
        x_axes[axis] = (_FREE + number,)
        sizes[_FREE + number] = x.shape[axis]

    bound = (*contracting[here], *batching[here])
    weight_free = [weight_axes[i] for i in range(len(weight_axes)) if i not in bound]
    x_free = [x_axes[i] for i in free]
    batch = [weight_axes[i] for i in batching[here]]
    out_axes = batch + (weight_free + x_free if weight_first else x_free + weight_free)
    summed = frozenset(_flat([weight_axes[i] for i in contracting[here]]))

    def product_of(x, weight):
        operands = (weight, x) if weight_first else (x, weight)
        return jax.lax.dot_general(*operands, dimension_numbers, **out_type)

    def split(product: Product) -> tuple[list[int], list[int]]:
        """The bases that meet x in the forward pass, and those that meet δ in the backward."""
        early = [i for i, side in enumerate(product.sides()) if side <= summed]
        return early, [i for i in range(len(product.bases)) if i not in early]

    @jax.custom_vjp
    def apply(x, weight, products):
        del products
        return product_of(x, weight)

    def forward(x, weight, products):
        names, named = _flat(x_axes), _ungroup(x, x_axes, sizes)
        saved = []
        for product in products:
            early, _ = split(product)
            saved.append(_apply_bases(named, names, product, early)[0] if early else x)
        return product_of(x, weight), (tuple(saved), weight, products)

    x_like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def backward(residuals, delta):
        saved, weight, products = residuals
        transpose = jax.linear_transpose(lambda x: product_of(x, weight), x_like)
        (x_cotangent,) = transpose(delta)
        named_delta = _ungroup(delta, out_axes, sizes)
        cores = []
        for product, kept in zip(products, saved, strict=True):
            early, late = split(product)
            names = _flat(x_axes)
            if early:
                for number in early:
                    names = _names_after(names, product, number)
            else:
                kept = _ungroup(kept, x_axes, sizes)
            thin, thin_names = _apply_bases(named_delta, _flat(out_axes), product, late)
            cores.append(
                contract(
                    f"{_letters(names)},{_letters(thin_names)}->{_letters(product.axes.core)}",
                    kept,
                    thin,
                )
            )
        return x_cotangent, None, _cotangents(products, cores)

    apply.defvjp(forward, backward)
    return apply(x, factored.weight, factored.products)


def _names_after(names: tuple[int, ...], product: Product, number: int) -> tuple[int, ...]:
    axes, side = product.axes.bases[number], product.sides()[number]
    return tuple(n for n in names if n not in side) + tuple(
        n for n in axes if n not in side and n not in names
    )


def can_gather(factored: Factored, dimension_numbers: Any, slice_sizes: Sequence[int]) -> bool:
    """Whether a gather takes whole rows along every basis' side, as an embedding lookup does."""
    indexed = {
        *dimension_numbers.start_index_map,
        *dimension_numbers.collapsed_slice_dims,
        *getattr(dimension_numbers, "operand_batching_dims", ()),
    }
    if any(len(product.bases) != 1 for product in factored.products):
        return False
    for product in factored.products:
        (side,) = product.sides()
        positions = [i for i, names in enumerate(factored.axes) if side & set(names)]
        if len(positions) != 1 or set(factored.axes[positions[0]]) != side or len(side) != 1:
            return False
        (position,) = positions
        if position in indexed or slice_sizes[position] != factored.weight.shape[position]:
            return False
        # The core must have the weight's axes, with the rank in the side's place.
        if any(len(names) != 1 for names in factored.axes):
            return False
        if set(product.axes.core) - {_rank_of(product)} != set(_flat(factored.axes)) - side:
            return False
        if set(product.axes.bases[0]) != side | {_rank_of(product)}:
            return False
    return True


def _rank_of(product: Product) -> int:
    return product.axes.bases[0][-1]


def gather(factored: Factored, indices: Array, params: dict[str, Any], bind: Any) -> Array:
    """An embedding lookup; its backward pass scatters rows of r numbers and not of d.

    Args:
        factored: the table.
        indices: the start indices of ``lax.gather``.
        params: the parameters of the gather primitive.
        bind: the primitive's ``bind``.

    Returns:
        The rows.
    """
    numbers = params["dimension_numbers"]
    dropped = {
        *numbers.collapsed_slice_dims,
        *getattr(numbers, "operand_batching_dims", ()),
    }
    kept = [i for i in range(len(factored.axes)) if i not in dropped]

    def lookup(table, indices, width, position):
        sizes = list(params["slice_sizes"])
        sizes[position] = width
        return bind(table, indices, **(params | {"slice_sizes": tuple(sizes)}))

    # Everything traced is an argument: the backward pass runs where closures are dead.
    @jax.custom_vjp
    def apply(weight, indices, products):
        del products
        return bind(weight, indices, **params)

    def forward(weight, indices, products):
        return bind(weight, indices, **params), (indices, products)

    def backward(residuals, delta):
        indices, products = residuals
        cores = []
        for product in products:
            (side,) = product.sides()
            position = next(i for i, names in enumerate(factored.axes) if names[0] in side)
            out_axis = numbers.offset_dims[kept.index(position)]
            basis = product.bases[0]
            names = string.ascii_letters[: delta.ndim]
            thin = names[:out_axis] + "Z" + names[out_axis + 1 :]
            side_axis = product.axes.bases[0].index(next(iter(side)))
            basis_names = f"{names[out_axis]}Z" if side_axis == 0 else f"Z{names[out_axis]}"
            rows = contract(f"{names},{basis_names}->{thin}", delta, basis)
            # The core in the weight's axis order, with the rank in the side's place.
            order = [
                _rank_of(product) if i == position else n[0] for i, n in enumerate(factored.axes)
            ]
            shape = [product.core.shape[product.axes.core.index(n)] for n in order]
            width = shape[position]
            scatter = jax.linear_transpose(
                lambda table, position=position, width=width: lookup(
                    table, indices, width, position
                ),
                jax.ShapeDtypeStruct(tuple(shape), rows.dtype),
            )
            (core,) = scatter(rows)
            cores.append(core.transpose([order.index(n) for n in product.axes.core]))
        return None, None, _cotangents(products, cores)

    apply.defvjp(forward, backward)
    return apply(factored.weight, indices, factored.products)


def reshape(factored: Factored, new_shape: Sequence[int]) -> Factored | None:
    """The weight in another shape, if that only merges axes or adds and drops length 1."""
    shape = factored.weight.shape
    old = [(size, names) for size, names in zip(shape, factored.axes, strict=True) if names]
    axes: list[tuple[int, ...]] = []
    place = 0
    for size in new_shape:
        if size == 1:
            if place < len(old) and old[place][0] == 1:
                axes.append(old[place][1])
                place += 1
            else:
                axes.append(())
            continue
        names: tuple[int, ...] = ()
        length = 1
        while length < size and place < len(old):
            length *= old[place][0]
            names += old[place][1]
            place += 1
        if length != size:
            return None
        axes.append(names)
    if place != len(old) or math.prod(new_shape) != factored.weight.size:
        return None
    return factored.with_weight(factored.weight.reshape(tuple(new_shape)), tuple(axes))
