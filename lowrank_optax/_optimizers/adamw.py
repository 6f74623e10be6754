"""Whole optimizers by name, built from the parts."""

from typing import Any

import jax
import optax


def plain_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    weight_decay: optax.ScalarOrSchedule,
    mask: Any,
    mu_dtype: Any,
) -> optax.GradientTransformation:
    """Adam, with weight decay where there is any."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        # The same updates, without reading every weight to add nothing to it.
        return optax.adam(learning_rate, b1, b2, eps, mu_dtype=mu_dtype)
    return optax.adamw(
        learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask
    )
