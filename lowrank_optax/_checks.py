"""Arguments that users give: is it a choice, a static number, a rank?"""

import difflib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Rank = int | float | np.integer | np.floating


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_static(name: str, value: object) -> None:
    """Raises TypeError if a value that shapes the computation is a traced array."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a Python number, got an array {value}; it decides shapes, so it "
            f"cannot change between steps. Under optax.inject_hyperparams name it in "
            f"static_args, e.g. static_args={(name.split()[-1],)!r}"
        )


def check_rank(rank: Any, name: str = "rank") -> None:
    """Raises unless ``rank`` is a positive int, or a float in (0, 1]."""
    check_static(name, rank)
    integer = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not integer and not isinstance(rank, float | np.floating):
        raise TypeError(f"{name} must be an int or a float, got {type(rank).__name__} {rank!r}")
    if integer and rank < 1:
        raise ValueError(f"{name}={rank} projects onto nothing; use a rank of at least 1")
    if not integer and not 0 < rank <= 1:
        raise ValueError(
            f"{name}={rank} as a float is a fraction of the smaller side, in (0, 1]; "
            f"for {rank:g} columns write rank={max(1, round(float(rank)))}"
            if np.isfinite(rank)
            else f"{name}={rank} is not a rank; use an int, or a fraction in (0, 1]"
        )


def choose(what: str, name: str, choices: Any) -> str:
    """``name`` if it is one of ``choices``, else a ValueError that lists them."""
    if name in choices:
        return name
    near = difflib.get_close_matches(name, list(choices), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} {name!r} is none of {', '.join(choices)}{hint}")
