"""States that keep moments in few bits, worked on with these moments opened.

Such a state, :class:`QuantizedState` here, has ``opened()``, the same with every moment in full,
and ``mapped(fn)``, itself with what ``fn`` makes of the opened one, one weight after the other.
Its field ``codes`` has the structure of what it opens to.
"""

from collections.abc import Callable
from typing import Any

import jax

from lowrank_optax._arrays.tree import PyTree
from lowrank_optax._inner.sites import Keys


def _is_stored(node: object) -> bool:
    return hasattr(node, "opened") and hasattr(node, "mapped")


def opened(state: PyTree) -> PyTree:
    """An optimizer state with the moments that are stored in few bits in full."""
    return jax.tree.map(
        lambda node: node.opened() if _is_stored(node) else node, state, is_leaf=_is_stored
    )


def map_opened(
    fn: Callable[..., PyTree], state: PyTree, mirrors: frozenset[Keys], *rest: PyTree
) -> PyTree:
    """Applies a function to a state, and to each part of it that is stored in few bits.

    Args:
        fn: from a state, its mirrors and further trees like it to another such state.
        state: the state; what is stored in few bits reaches ``fn`` opened, on its own.
        mirrors: the keys that lead to the state's mirrors of params.
        *rest: trees of the state's structure.

    Returns:
        The new state.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_stored)
    stored = [_is_stored(node) for _, node in pairs]
    if not any(stored):
        return fn(state, mirrors, *rest)
    columns = [[node for _, node in pairs], *(treedef.flatten_up_to(other) for other in rest)]

    def without(column: list[Any]) -> PyTree:
        masked = [None if few else node for few, node in zip(stored, column, strict=True)]
        return treedef.unflatten(masked)

    outside, *others = map(without, columns)
    results = treedef.flatten_up_to(fn(outside, mirrors, *others))
    for place, ((keys, node), few) in enumerate(zip(pairs, stored, strict=True)):
        if few:
            codes = (*keys, jax.tree_util.GetAttrKey("codes"))
            inside = frozenset(m[len(codes) :] for m in mirrors if m[: len(codes)] == codes)
            more = [column[place].opened() for column in columns[1:]]
            results[place] = node.mapped(lambda full, i=inside, m=more: map_opened(fn, full, i, *m))
    return treedef.unflatten(results)
