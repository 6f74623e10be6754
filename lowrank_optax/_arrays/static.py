"""Hashable facts that travel in an optimizer state as pytree nodes without leaves."""

import contextlib
import sys

import jax

_STATIC: list[type] = []


def register_static(kind: type) -> None:
    """Makes a hashable class a pytree node without leaves, which an optimizer state may hold."""
    _STATIC.append(kind)
    jax.tree_util.register_pytree_node(kind, lambda node: ((), node), lambda node, _: node)


def register_with_flax() -> None:
    """Lets ``flax.serialization`` pass over static nodes, where Flax is in use."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    for kind in _STATIC:
        with contextlib.suppress(ValueError):  # registered before
            serialization.register_serialization_state(kind, lambda _: {}, lambda node, _: node)
