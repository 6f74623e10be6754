"""A loss, traced once, that can be differentiated in any subspaces."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from lowrank_optax._arrays import mesh, tree
from lowrank_optax._arrays.boxes import rebox, unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._matrix_free import interpreter
from lowrank_optax._matrix_free.products import factored_weight
from lowrank_optax._matrix_free.targets import CompactTarget
from lowrank_optax._matrix_free.weight import Factored, Product


class CompactLoss:
    """A loss, traced once, that can be differentiated with any bases.

    Attributes:
        targets: the targets found in params.
        places: the number of each target's leaf among the leaves of params.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: int,
        has_aux: bool,
        targets: Sequence[CompactTarget],
    ):
        paths, boxes, self._treedef = tree.flatten_with_paths(args[argnums])
        self._boxes = boxes
        self._present = [i for i, box in enumerate(boxes) if box is not None]
        self._leaves = {i: unbox(boxes[i]) for i in self._present}
        self._has_aux = has_aux
        self._aux_treedef: Any = None
        self._aux_static: dict[int, Any] = {}
        self._aux_places: list[int] = []
        self.targets = targets
        places = {path: i for i, path in enumerate(paths)}
        self.places = [_place(target, places, self._leaves) for target in targets]

        def flat_loss(leaves):
            filled = list(boxes)
            for i, leaf in zip(self._present, leaves, strict=True):
                filled[i] = rebox(boxes[i], leaf)
            params = tree.unflatten(self._treedef, filled)
            result = loss_fn(*args[:argnums], params, *args[argnums + 1 :], **kwargs)
            value, aux = result if has_aux else (result, None)
            leaves, self._aux_treedef = jax.tree.flatten(aux)
            arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
            self._aux_static = {i: leaf for i, leaf in enumerate(leaves) if i not in arrays}
            self._aux_places = list(arrays)
            return [value, *arrays.values()]

        closed = jax.make_jaxpr(flat_loss)([self._leaves[i] for i in self._present])
        self._jaxpr = closed.jaxpr
        self._consts = closed.consts
        if self._jaxpr.outvars[0].aval.shape != ():
            raise TypeError(
                f"the loss must be a scalar, got shape {self._jaxpr.outvars[0].aval.shape}"
            )

    def value_and_products(
        self,
        products: Sequence[Sequence[Product]],
        report: interpreter.Report = lambda use: None,
    ) -> tuple[Array, list[Array], dict[int, Array], list[list[Array]]]:
        """The loss, its aux arrays, gradients of leaves that are no target, and products.

        Args:
            products: for each target the products that are wanted.
            report: called with each use of a target.

        Returns:
            The value, aux arrays, gradients by leaf number, and one list of products a target.
        """
        projected = set(self.places)
        others = {i: x for i, x in self._leaves.items() if i not in projected}

        def loss(others, cores):
            inputs = dict(others)
            rows = zip(self.places, self.targets, products, cores, strict=True)
            for place, target, wanted, zeros in rows:
                filled = [
                    dataclasses.replace(product, core=core)
                    for product, core in zip(wanted, zeros, strict=True)
                ]
                weight = jax.lax.stop_gradient(self._leaves[place])
                inputs[place] = factored_weight(weight, target.path, filled)
            ordered = [inputs[i] for i in self._present]
            outputs = interpreter.evaluate(self._jaxpr, self._consts, ordered, report)
            value, *aux = (x.weight if isinstance(x, Factored) else x for x in outputs)
            return value, aux

        cores = [
            [_spread(product, self._leaves[place]) for product in wanted]
            for place, wanted in zip(self.places, products, strict=True)
        ]
        (value, aux), (gradients, cores) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            others, cores
        )
        return value, aux, gradients, cores

    def results(
        self,
        value: Array,
        aux: Sequence[Array],
        gradients: dict[int, Array],
        compact: list[Compact],
    ) -> tuple[Any, Any]:
        """The value (with aux) and the tree of gradients, as the caller gets them."""
        filled = list(self._boxes)
        for i, gradient in gradients.items():
            filled[i] = rebox(self._boxes[i], gradient)
        for place, gradient in zip(self.places, compact, strict=True):
            filled[place] = gradient
        grads = tree.unflatten(self._treedef, filled)
        if not self._has_aux:
            return value, grads
        leaves = self._aux_static | dict(zip(self._aux_places, aux, strict=True))
        ordered = [leaves[i] for i in range(len(leaves))]
        return (value, jax.tree.unflatten(self._aux_treedef, ordered)), grads


def _spread(product: Product, weight: Array) -> Array:
    """The empty core of a product, placed as the optimizer keeps such arrays."""
    axes = [axis if axis >= 0 else None for axis in product.axes.core]
    return mesh.place(product.core, axes, weight, spreading=True)


def _is_array(x: object) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _place(target: CompactTarget, places: dict[str, int], leaves: dict[int, Array]) -> int:
    plan = target.projection
    if plan.path not in places:
        raise ValueError(
            f"compact_value_and_grad: opt_state projects {plan.path!r}, which params do not have; "
            "pass the state that was made by init on these params"
        )
    place = places[plan.path]
    if place not in leaves or tuple(leaves[place].shape) != plan.shape:
        found = tuple(leaves[place].shape) if place in leaves else None
        raise ValueError(
            f"compact_value_and_grad: {plan.path!r} has shape {found}, but opt_state was made for "
            f"{plan.shape}; call init on these params, or pass the state that belongs to them"
        )
    return place
