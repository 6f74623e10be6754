"""What the fields of an optimizer state mean: which are moments, and of which order."""

from collections.abc import Callable
from typing import Any

import jax

from lowrank_optax._arrays import tree
from lowrank_optax._plan.plan import Plan

# Roles of an inner state's fields. FIRST: averages of gradients. SECOND: averages of squared
# gradients, whose mean square the first moment knows. VARIANCE: anything else that is
# quadratic in the gradient, with no mean to take out.
_FIRST, _SECOND, _VARIANCE = "first", "second", "variance"


_ROLES = {
    "mu": _FIRST,
    "trace": _FIRST,
    "m": _FIRST,
    "acc_grads": _FIRST,
    "nu": _SECOND,
    "v": _SECOND,
    "nu_max": _VARIANCE,
    "sum_of_squares": _VARIANCE,
}


# States whose fields mean something else than their names say.
_ROLES_BY_STATE = {
    "ScaleByBeliefState": {"mu": _FIRST, "nu": _VARIANCE},
    "ScaleByAdanState": {"m": _FIRST, "v": _FIRST, "g": _FIRST, "n": _VARIANCE},
}


def field_roles(node: Any) -> dict[str, str]:
    """The roles of the fields of one state NamedTuple that are recognised as moments."""
    roles = _ROLES_BY_STATE.get(type(node).__name__, _ROLES)
    return {field: roles[field] for field in node._fields if field in roles}


def is_namedtuple(node: Any) -> bool:
    """Whether a node of an optimizer state has named fields."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def opened(state: Any) -> Any:
    """An optimizer state with the moments that are stored in few bits in full."""

    def is_stored(node: Any) -> bool:
        return hasattr(node, "opened")

    return jax.tree.map(
        lambda node: node.opened() if is_stored(node) else node, state, is_leaf=is_stored
    )


def map_moments(fn: Callable[..., Any], state: Any, *rest: Any) -> Any:
    """Applies ``fn`` to every state NamedTuple that has moments, through any wrapper."""
    if hasattr(state, "opened"):
        # Moments in few bits, which are worked on in full.
        others = [node.opened() for node in rest]
        return state.mapped(lambda opened: map_moments(fn, opened, *others))
    if is_namedtuple(state):
        roles = field_roles(state)
        moved = fn(state, *rest) if roles else state
        # A state with moments of its own may hold another's, as that of optax.MultiSteps does.
        others = {
            field: map_moments(fn, *(getattr(node, field) for node in (state, *rest)))
            for field in state._fields
            if field not in roles
        }
        return moved._replace(**others)
    if isinstance(state, tuple | list):
        return type(state)(map_moments(fn, *parts) for parts in zip(state, *rest, strict=True))
    if isinstance(state, dict):
        return {k: map_moments(fn, v, *(r[k] for r in rest)) for k, v in state.items()}
    return state


def kept_fields(inner_state: Any, plan: Plan) -> list[str]:
    """Names of state fields that belong to a target and that ``"rotate"`` leaves as they are."""
    suffixes = tuple("/" + plan.leaves[index].path for index in plan.targets)
    kept: dict[str, None] = {}

    def visit(node: Any, name: str) -> None:
        if is_namedtuple(node):
            recognised = field_roles(node)
            for field in node._fields:
                if field not in recognised:
                    visit(getattr(node, field), f"{type(node).__name__}.{field}")
        elif isinstance(node, tuple | list):
            for part in node:
                visit(part, name)
        elif name and any(("/" + p).endswith(suffixes) for p in tree.by_path(node)):
            kept[name] = None

    if suffixes:
        visit(inner_state, "")
    return list(kept)
