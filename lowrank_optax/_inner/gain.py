"""How strongly an inner optimizer answers, its memory aside: the learning rate in it.

A lift that puts part of the gradient beside the inner optimizer's update must know its sign, and
one that compares steps must not mistake a warm-up for growth. Both are seen by asking the inner
optimizer, with its schedules where they are and its moments empty, about a gradient of 1.
"""

from typing import Any

import jax
import optax

from lowrank_optax._arrays.tree import OptState, PyTree, flatten, unflatten
from lowrank_optax._inner import probe
from lowrank_optax._inner.roles import field_roles
from lowrank_optax._inner.sites import sites


def _forgetful(state: OptState, fresh: OptState) -> OptState:
    """``state`` with every moment, and the count that corrects its bias, from ``fresh``."""
    leaves, treedef = flatten(state)
    new = flatten(fresh)[0]
    for number, site in enumerate(sites(state, ())):
        if site.outer_role or (site.field == "count" and field_roles(site.owner)):
            leaves[number] = new[number]
    return unflatten(treedef, leaves)


def gains(
    inner: optax.GradientTransformationExtraArgs | None,
    inner_state: OptState,
    cores: PyTree,
    extra_args: dict[str, Any],
) -> PyTree:
    """The inner optimizer's answer to a gradient of 1, leaf by leaf.

    For ``optax.adamw(learning_rate)`` that is minus the learning rate of this step; for
    ``optax.scale_by_adam()`` it is 1, as for a filter, which has no inner optimizer.

    Args:
        inner: the inner optimizer, or None.
        inner_state: its state before the update.
        cores: the tree that it will update, for its structure.
        extra_args: the extra arguments of this update.

    Returns:
        A tree like ``cores`` of one-element arrays.
    """
    if inner is None:
        return probe.probes(cores, 1.0)
    state = probe.probe_state(inner, inner_state, cores)
    params = probe.probes(cores, 1.0)
    state = _forgetful(state, inner.init(params))

    def answer(gradient: float) -> PyTree:
        return inner.update(probe.probes(cores, gradient), state, params, **extra_args)[0]

    # Half the difference is free of all that does not depend on the gradient, as decay does not.
    return jax.tree.map(lambda up, down: (up - down) / 2, answer(1.0), answer(-1.0))
