"""What ``migrate`` reads from the old state, found by what it means."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from lowrank_optax._inner import carry, probe
from lowrank_optax._inner.roles import field_roles
from lowrank_optax._inner.sites import Site, sites

# Fields that count updates, the most telling first.
COUNTS = ("tracker_count", "count", "gradient_step")


class OldState:
    """The arrays of the old state, found by what they mean."""

    def __init__(self, all_sites: Sequence[Site]):
        self.sites = [site for site in all_sites if site.value is not None]
        self._by_kind: dict[Any, list[Site]] = {}
        self._by_role: dict[Any, list[Site]] = {}
        for site in self.sites:
            self._by_kind.setdefault(site.kind, []).append(site)
            if site.role:
                self._by_role.setdefault((site.field, site.role, site.path), []).append(site)
        self.fields = {(type(site.owner).__name__, site.field) for site in self.sites}

    def find(self, site: Site, turn: int) -> Site | None:
        """The counterpart of an array of the new state, the ``turn``-th of its kind."""
        found = self._by_kind.get(site.kind, [])
        if site.role and not found:
            found = self._by_role.get((site.field, site.role, site.path), [])
        if not found:
            return None
        same_place = next((old for old in found if old.name == site.name), None)
        return same_place or found[min(turn, len(found) - 1)]

    @functools.cached_property
    def steps(self) -> Any:
        """How many updates the old optimizer has made, None if nothing counted them."""
        with_moments = {id(site.owner) for site in self.sites if site.role}
        for field in COUNTS:
            counts = [s for s in self.sites if s.field == field and s.value.shape == ()]
            # A count beside moments is one of updates; others may run only now and then.
            counts.sort(key=lambda site: id(site.owner) not in with_moments)
            if counts:
                return counts[0].value
        return None


class Biases:
    """By what to scale squares of first moments, to compare them with second moments."""

    def __init__(self, old: OldState, old_tx: Any, params: Any, paths: list[str]):
        def owners(all_sites: Sequence[Site]) -> list[Any]:
            found = {id(site.owner): site.owner for site in all_sites if site.role}
            return list(found.values())

        self._probed: dict[int, tuple[Any, Any]] = {}
        nodes = owners(old.sites)
        if not any("second" in field_roles(node).values() for node in nodes):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pair = probe.outer_decay_rates(old_tx, params)
        except Exception:
            # An optimizer that wants more than gradients cannot be asked; averages that have
            # run for long need no correction.
            return
        one, two = (owners(sites(state, paths)) for state in pair)
        if [type(n) for n in nodes] == [type(n) for n in one]:
            triples = zip(nodes, one, two, strict=True)
            self._probed = {id(node): (first, second) for node, first, second in triples}

    def of(self, node: Any, path: str, first: str, second: str, steps: Any) -> Any:
        """The factor c for one weight."""
        if id(node) not in self._probed:
            return jnp.ones([])
        count = jnp.zeros([], jnp.int32) if steps is None else steps
        return carry.bias_ratio(node, path, first, second, count, *self._probed[id(node)])
