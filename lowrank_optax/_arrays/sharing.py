"""One compiled computation for all leaves that look alike."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_optax._arrays.tree import PyTree


def _signature(tree: PyTree) -> Hashable:
    """What two calls must share to share one computation: structure, shapes, shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    typeof = getattr(jax, "typeof", None)
    return treedef, tuple(
        (x.shape, x.dtype, str(typeof(x)) if typeof else "") for x in map(jnp.asarray, leaves)
    )


def map_sharing(
    fn: Callable[..., PyTree], calls: Sequence[tuple[Hashable, tuple[Any, ...]]]
) -> list[PyTree]:
    """Calls ``fn(*arguments)`` for each entry, compiling it once for all that look alike.

    Calls whose static key and argument shapes agree run one after the other in a loop over
    one copy of the computation, so that compile time does not grow with the number of
    layers. Each turn of the loop picks its own arguments, which are never stacked: that
    would double the memory of the gradients.

    Args:
        fn: a function of a static key and arrays.
        calls: pairs of a hashable static key, and a tuple of pytrees of arrays.

    Returns:
        The results, in the order of ``calls``.
    """
    groups: dict[tuple[Hashable, Hashable], list[int]] = {}
    for index, (static, arguments) in enumerate(calls):
        groups.setdefault((static, _signature(arguments)), []).append(index)
    results: list[PyTree] = [None] * len(calls)
    for (static, _), members in groups.items():
        if len(members) == 1:
            results[members[0]] = fn(static, *calls[members[0]][1])
            continue

        def one(turn, static=static, members=members):
            picks = [lambda index=index: calls[index][1] for index in members]
            return fn(static, *jax.lax.switch(turn, picks))

        stacked = jax.lax.map(one, jnp.arange(len(members)))
        for turn, index in enumerate(members):
            results[index] = jax.tree.map(lambda x, turn=turn: x[turn], stacked)
    return results
