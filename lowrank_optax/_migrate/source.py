"""What ``migrate`` reads from the old state, found by what it means."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowrank_optax._arrays.tree import OptState, Params
from lowrank_optax._inner import carry, probe
from lowrank_optax._inner.roles import SECOND
from lowrank_optax._migrate.space import Place, places

# Fields that count updates, the most telling first.
COUNTS = ("tracker_count", "count", "gradient_step")


class OldState:
    """The arrays of the old state, found by what they mean."""

    def __init__(self, found: Sequence[Place]):
        self.places = [place for place in found if place.value is not None]
        self._by_kind: dict[Any, list[Place]] = {}
        self._by_role: dict[Any, list[Place]] = {}
        for place in self.places:
            self._by_kind.setdefault(place.kind, []).append(place)
            if place.site.role:
                self._by_role.setdefault(
                    (place.site.field, place.site.role, place.path), []
                ).append(place)
        self.fields = {(type(place.site.owner).__name__, place.site.field) for place in self.places}

    def find(self, place: Place, turn: int) -> Place | None:
        """The counterpart of an array of the new state, the ``turn``-th of its kind."""
        found = self._by_kind.get(place.kind, [])
        if place.site.role and not found:
            found = self._by_role.get((place.site.field, place.site.role, place.path), [])
        if not found:
            return None
        same_place = next((old for old in found if old.site.name == place.site.name), None)
        return same_place or found[min(turn, len(found) - 1)]

    @functools.cached_property
    def steps(self) -> Array | None:
        """How many updates the old optimizer has made, None if nothing counted them."""
        with_moments = {id(place.site.owner) for place in self.places if place.site.role}
        for field in COUNTS:
            counts = [s for s in self.places if s.site.field == field and s.value.shape == ()]
            # A count beside moments is one of updates; others may run only now and then.
            counts.sort(key=lambda place: id(place.site.owner) not in with_moments)
            if counts:
                return counts[0].value
        return None


class Biases:
    """By what to scale squares of first moments, to compare them with second moments."""

    def __init__(self, old: OldState, old_tx: optax.GradientTransformation, params: Params):
        # For each node of the old state that has moments, what two steps of gradient 1 make of
        # each of its arrays: by field and weight.
        self._probed: dict[int, dict[tuple[str, str], tuple[Any, Any]]] = {}
        if not any(place.site.role == SECOND for place in old.places):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pair = probe.outer_decay_rates(old_tx, params)
        except Exception:
            # An optimizer that wants more than gradients cannot be asked; averages that have
            # run for long need no correction.
            return
        nodes = _with_moments(old.places)
        one, two = (_with_moments(places(state, params, old_tx)) for state in pair)
        if [type(n) for n, _ in nodes] == [type(n) for n, _ in one]:
            for (node, _), (_, first), (_, second) in zip(nodes, one, two, strict=True):
                self._probed[id(node)] = {key: (x, second.get(key)) for key, x in first.items()}

    def of(self, node: OptState, path: str, first: str, second: str, steps: Array | None) -> Any:
        """The factor c for one weight."""
        probed = self._probed.get(id(node))
        if probed is None:
            return jnp.ones([])
        count = jnp.zeros([], jnp.int32) if steps is None else steps
        nothing = (None, None)
        pair = (probed.get((field, path), nothing) for field in (first, second))
        return carry.bias_ratio(node, count, *pair)


def _with_moments(found: Sequence[Place]) -> list[tuple[Any, dict[tuple[str, str], Any]]]:
    """Each state node that has moments, in order, with these by field and weight."""
    nodes: dict[int, tuple[Any, dict[tuple[str, str], Any]]] = {}
    for place in found:
        if place.site.role and place.value is not None:
            owner = place.site.owner
            _, values = nodes.setdefault(id(owner), (owner, {}))
            values[place.site.field, place.path] = place.value
    return list(nodes.values())
