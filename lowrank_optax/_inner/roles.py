"""What the fields of an optimizer state mean: which are moments, and of which order."""

import dataclasses

# Roles of an inner state's fields. FIRST: averages of gradients. SECOND: averages of squared
# gradients, whose mean square the first moment knows. VARIANCE: anything else that is
# quadratic in the gradient, with no mean to take out.
FIRST, SECOND, VARIANCE = "first", "second", "variance"
_ROLES = {
    "mu": FIRST,
    "trace": FIRST,
    "m": FIRST,
    "acc_grads": FIRST,
    "nu": SECOND,
    "v": SECOND,
    "nu_max": VARIANCE,
    "sum_of_squares": VARIANCE,
}
# States whose fields mean something else than their names say.
_ROLES_BY_STATE = {
    "ScaleByBeliefState": {"mu": FIRST, "nu": VARIANCE},
    "ScaleByAdanState": {"m": FIRST, "v": FIRST, "g": FIRST, "n": VARIANCE},
}


MOMENTS = frozenset(_ROLES).union(*_ROLES_BY_STATE.values())
"""Every name of a field that may be a moment."""


def field_names(node: object) -> tuple[str, ...]:
    """The fields of a state node, a NamedTuple or a dataclass; none of anything else."""
    if isinstance(node, tuple):
        return tuple(getattr(node, "_fields", ()))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return tuple(field.name for field in dataclasses.fields(node))
    return ()


def field_roles(node: object) -> dict[str, str]:
    """The roles of the fields of one state node that are recognised as moments."""
    roles = _ROLES_BY_STATE.get(type(node).__name__, _ROLES)
    return {field: roles[field] for field in field_names(node) if field in roles}
