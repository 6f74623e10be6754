"""Operations on factored weights whose backward pass makes cores: one function a rule."""

import math
import string
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from lowrank_optax._arrays.contract import contract
from lowrank_optax._arrays.mesh import type_sharding
from lowrank_optax._matrix_free.weight import (
    FREE,
    Factored,
    Product,
    apply_bases,
    cotangents,
    flat_axes,
    letters,
    moment,
    ungroup,
)


def can_dot(factored: Factored, contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether a ``dot_general`` over these axes of the weight has a compact backward pass.

    Each basis must contract axes that are all summed over by the product, or all free.
    """
    summed = frozenset(flat_axes([factored.axes[i] for i in contracted]))
    batched = frozenset(flat_axes([factored.axes[i] for i in batch]))
    free = frozenset(flat_axes(factored.axes)) - summed - batched
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
    r"""``lax.dot_general`` of an array and a factored weight.

    With t the axes that only x has (tokens), i those that the product sums over, o those that only
    the weight has, and b the batch axes of both,

    .. math:: y_{bto} = \sum_i x_{bti} W_{bio}, \qquad
              G_{bio} = \sum_t x_{bti}\,\delta_{bto}

    where δ is the cotangent of y. A basis meets either i or o, and the sums over it and over t
    may be done in any order. So a basis P of i is summed with x first, in the forward pass, one Q
    of o with δ, in the backward pass, and G is never there:

    .. math:: (P^T G Q)_{brs} = \sum_t \Bigl(\sum_i x_{bti} P_{bir}\Bigr)
              \Bigl(\sum_o \delta_{bto} Q_{bos}\Bigr)

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
        x_axes[axis] = (FREE + number,)
        sizes[FREE + number] = x.shape[axis]

    bound = (*contracting[here], *batching[here])
    weight_free = [weight_axes[i] for i in range(len(weight_axes)) if i not in bound]
    x_free = [x_axes[i] for i in free]
    batch = [weight_axes[i] for i in batching[here]]
    out_axes = batch + (weight_free + x_free if weight_first else x_free + weight_free)
    summed = frozenset(flat_axes([weight_axes[i] for i in contracting[here]]))

    def product_of(x, weight):
        operands = (weight, x) if weight_first else (x, weight)
        return jax.lax.dot_general(*operands, dimension_numbers, **out_type)

    def split(product: Product) -> tuple[list[int], list[int]]:
        """The bases that meet x in the forward pass, and those that meet δ in the backward.

        A side is wholly summed over or wholly free, as :func:`can_dot` has made sure.
        """
        early = [i for i, side in enumerate(product.sides()) if side <= summed]
        return early, [i for i in range(len(product.bases)) if i not in early]

    @jax.custom_vjp
    def apply(x, weight, products):
        del products
        return product_of(x, weight)

    def forward(x, weight, products):
        names, named = flat_axes(x_axes), ungroup(x, x_axes, sizes)
        saved = []
        for product in products:
            early, _ = split(product)
            whole = product.axes.moment_of or not early
            # x P has r numbers a token where x has m. Of a basis of o alone x is kept as it is,
            # which costs nothing more where another use of x keeps it anyway.
            saved.append(x if whole else apply_bases(named, names, product, early)[0])
        return product_of(x, weight), (tuple(saved), weight, products)

    x_like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=type_sharding(x))

    def backward(residuals, delta):
        saved, weight, products = residuals
        # The cotangent of x is that of any product; JAX knows it best, in every layout.
        transpose = jax.linear_transpose(lambda x: product_of(x, weight), x_like)
        (x_cotangent,) = transpose(delta)
        named_delta = ungroup(delta, out_axes, sizes)
        cores = []
        for product, kept in zip(products, saved, strict=True):
            early, late = split(product)
            names = flat_axes(x_axes)
            if product.axes.moment_of:
                # Not of the gradient: xᵀ(x Ω) of what has the side's axes, x if these are summed
                # over and δ if they are free.
                if early:
                    operand = ungroup(kept, x_axes, sizes)
                else:
                    operand, names = named_delta, flat_axes(out_axes)
                cores.append(moment(operand, names, product))
                continue
            if early:
                for number in early:
                    names = product.names_after(names, number)
            else:
                kept = ungroup(kept, x_axes, sizes)
            # What is left to sum over are the names that both have and the core does not: tokens.
            thin, thin_names = apply_bases(named_delta, flat_axes(out_axes), product, late)
            cores.append(
                contract(
                    f"{letters(names)},{letters(thin_names)}->{letters(product.axes.core)}",
                    kept,
                    thin,
                )
            )
        return x_cotangent, None, cotangents(products, cores)

    apply.defvjp(forward, backward)
    return apply(x, factored.weight, factored.products)


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
        if (
            not product.axes.moment_of
            and set(product.axes.core) - {_rank_of(product)} != set(flat_axes(factored.axes)) - side
        ):
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
            if product.axes.moment_of:
                cores.append(contract(f"{names},{thin}->{basis_names}", delta, rows))
                continue
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
        return None, None, cotangents(products, cores)

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
