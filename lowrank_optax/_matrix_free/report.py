"""Seeing which weights' gradients are matrix-free, and what prevents it: ``compact_report``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lowrank_optax._arrays.tree import OptState
from lowrank_optax._matrix_free.loss import CompactLoss
from lowrank_optax._matrix_free.products import main_product
from lowrank_optax._matrix_free.targets import find_targets


@dataclasses.dataclass(frozen=True)
class CompactReport:
    """How each target's gradient is made; ``print`` it for a table.

    Attributes:
        uses: for each target, each operation that uses it and whether that has a compact
            backward pass. A target that no operation uses has no gradient.
    """

    uses: dict[str, tuple[tuple[str, bool], ...]]

    @property
    def matrix_free(self) -> bool:
        """Whether no full-sized gradient of any target is ever formed."""
        return all(compact for uses in self.uses.values() for _, compact in uses)

    def __str__(self) -> str:
        width = max((len(path) for path in self.uses), default=0)
        lines = []
        for path, uses in self.uses.items():
            fallbacks = sorted({primitive for primitive, compact in uses if not compact})
            text = "matrix-free" if uses else "not used"
            if fallbacks:
                text = f"full gradient, projected: {', '.join(fallbacks)} has no compact form"
            lines.append(f"{path.ljust(width)}  {text}")
        return "\n".join(lines)


def compact_report(
    loss_fn: Callable[..., Any],
    *args: Any,
    opt_state: OptState,
    argnums: int = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> CompactReport:
    """Says for each target whether its gradient is matrix-free, or which operation prevents it.

    Nothing is computed; arguments may be of type ``jax.ShapeDtypeStruct``.

    Args:
        loss_fn: the loss, as for :func:`compact_value_and_grad`.
        *args: its arguments.
        opt_state: the optimizer state.
        argnums: which positional argument is params.
        has_aux: whether ``loss_fn`` returns aux data.
        **kwargs: its keyword arguments.

    Returns:
        The report.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> params = {"a": jnp.ones((16, 32)), "b": jnp.ones((16, 32))}
        >>> loss = lambda p, x: jnp.sum(x @ p["a"]) + jnp.sum(jnp.sin(p["b"]))
        >>> state = lro.galore_adamw(1e-2, rank=4).init(params)
        >>> print(lro.compact_report(loss, params, jnp.ones((8, 16)), opt_state=state))
        a  matrix-free
        b  full gradient, projected: sin has no compact form
    """
    uses: dict[str, list[tuple[str, bool]]] = {}

    def trace(args, kwargs, opt_state):
        targets = find_targets(opt_state)
        uses.update({target.path: [] for target in targets})
        loss = CompactLoss(loss_fn, args, kwargs, argnums, has_aux, targets)
        products = [[main_product(target, target.wide(target.bases), None)] for target in targets]
        return loss.value_and_products(products, lambda use: uses[use[0]].append((use[1], use[2])))[
            0
        ]

    jax.eval_shape(trace, args, kwargs, opt_state)
    return CompactReport({path: tuple(dict.fromkeys(found)) for path, found in uses.items()})
