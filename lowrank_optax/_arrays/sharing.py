"""One compiled computation for all leaves that look alike."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lowrank_optax._arrays.tree import PyTree


def _signature(tree: PyTree) -> Hashable:
    """What two calls must share to share one computation: structure, shapes, shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    typeof = getattr(jax, "typeof", None)
    return treedef, tuple(
        (x.shape, x.dtype, str(typeof(x)) if typeof else "") for x in map(jnp.asarray, leaves)
    )


# Branches of one switch that picks.
_BRANCHES = 16


def _pick(turn: Int[Array, ""], choices: Sequence[PyTree]) -> PyTree:
    """The tree of a turn, out of trees that look alike, none of which is copied but that one.

    Every branch of a ``lax.switch`` takes the operands of all branches, so that one switch over
    n trees costs n² to trace. A tree of switches with b branches each, of which every level hands
    each operand to b branches, costs b n log n.
    """
    if len(choices) <= _BRANCHES:
        return jax.lax.switch(turn, [lambda choice=choice: choice for choice in choices])
    size = -(-len(choices) // _BRANCHES)
    groups = [choices[start : start + size] for start in range(0, len(choices), size)]
    branches = [lambda group=group: _pick(turn % size, group) for group in groups]
    return jax.lax.switch(turn // size, branches)


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
            return fn(static, *_pick(turn, [calls[index][1] for index in members]))

        stacked = jax.lax.map(one, jnp.arange(len(members)))
        for turn, index in enumerate(members):
            results[index] = jax.tree.map(lambda x, turn=turn: x[turn], stacked)
    return results
