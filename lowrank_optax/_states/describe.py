"""Seeing what an optimizer will project, and what it will store, before the first step."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import Leaf, unbox
from lowrank_optax._arrays.tree import Params, PyTree, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._inner.sites import Site, kept_fields, mirrors, sites
from lowrank_optax._plan.view import OUTPUT, REDUCTION, View
from lowrank_optax._subspace.state import SubspaceState
from lowrank_optax._text import format_bytes, table


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of :class:`Description`.

    Attributes:
        path: the leaf's name.
        shape: the parameter's shape.
        dtype: the parameter's dtype, by name.
        view: ``batch x m x n``, as the leaf is read; empty for leaves that are no target.
        side: the sides that have a basis; empty for leaves that are trained full-rank.
        rank: columns of the basis; 0 for leaves that are trained full-rank.
        state_bytes: bytes of optimizer state that belong to this leaf, bases included.
        adamw_bytes: bytes that ``optax.adamw`` would keep for it.
        note: why a target is trained full-rank.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    view: str
    side: str
    rank: int
    state_bytes: int
    adamw_bytes: int
    note: str


@dataclasses.dataclass(frozen=True)
class Description:
    """What :func:`describe` returns; ``print`` it for a table.

    Attributes:
        rows: one entry a leaf.
        shared_bytes: bytes of state that belong to no leaf: counts, schedules, metrics.
        notes: what else a user should know.
    """

    rows: tuple[Row, ...]
    shared_bytes: int
    notes: tuple[str, ...]

    @property
    def state_bytes(self) -> int:
        """All bytes of optimizer state."""
        return self.shared_bytes + sum(row.state_bytes for row in self.rows)

    @property
    def adamw_bytes(self) -> int:
        """The bytes that ``optax.adamw`` would keep for the same params."""
        return sum(row.adamw_bytes for row in self.rows) + 4

    def __str__(self) -> str:
        head = ("leaf", "shape", "view", "side", "rank", "state", "adamw", "")
        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            rank = str(row.rank) if row.rank else "full"
            sizes = (format_bytes(row.state_bytes), format_bytes(row.adamw_bytes))
            cells.append(
                (
                    row.path,
                    f"{row.dtype}{list(row.shape)}",
                    row.view,
                    row.side,
                    rank,
                    *sizes,
                    row.note,
                )
            )
        totals = (format_bytes(self.state_bytes), format_bytes(self.adamw_bytes))
        share = f"{self.state_bytes / self.adamw_bytes:.1%} of AdamW's"
        cells.append(("total", "", "", "", "", *totals, share))
        return "\n".join([table(head, cells, left=len(head)), *self.notes])


def _bytes(x: Leaf) -> int:
    return math.prod(x.shape) * x.dtype.itemsize  # typed keys have no NumPy dtype


def _view_text(view: View) -> str:
    return " x ".join(map(str, (*view.batch_shape, f"{view.rows}x{view.columns}")))


def _bytes_by_weight(found: Sequence[Site], weights: Collection[str]) -> tuple[dict[str, int], int]:
    """The bytes of a state that belong to each weight, and those that belong to none."""
    sizes = dict.fromkeys(weights, 0)
    shared = 0
    for site in found:
        if site.value is None:
            continue
        # Of one weight a mirror may hold several arrays: kernel/0, kernel/1.
        owner = site.weight
        while owner and owner not in sizes:
            owner = owner.rpartition("/")[0]
        if owner is None or owner not in sizes:
            shared += _bytes(site.value)
        else:
            sizes[owner] += _bytes(site.value)
    return sizes, shared


def _sites(tx: optax.GradientTransformation, params: PyTree) -> list[Site]:
    state = jax.eval_shape(tx.init, params)
    return sites(state, mirrors(state, params, tx))


def describe(tx: optax.GradientTransformation, params: Params) -> Description:
    """Shows, per leaf, how an optimizer projects params and what it stores for them.

    Nothing is computed or allocated: it works for models that do not fit here.

    Args:
        tx: an optimizer, with this library's transformations anywhere inside.
        params: a params tree; ``jax.ShapeDtypeStruct`` leaves will do.

    Returns:
        A table with path, shape, view, side, rank and bytes of optimizer state for each
        leaf beside ``optax.adamw``'s. ``state_bytes`` is the size of ``tx.init(params)``.

    Example:
        >>> import jax.numpy as jnp, lowrank_optax as lro
        >>> params = {"kernel": jnp.ones((64, 256)), "bias": jnp.zeros(256)}
        >>> print(lro.describe(lro.galore_adamw(1e-2, rank=8), params))
        leaf    shape             view    side       rank  state     adamw
        bias    float32[256]                         full  2.05 kB   2.05 kB
        kernel  float32[64, 256]  64x256  reduction  8     18.43 kB  131.07 kB
        total                                              20.50 kB  133.12 kB  15.4% of AdamW's
    """
    names, leaves, _ = tree.flatten_with_paths(params)
    present = [(n, unbox(leaf)) for n, leaf in zip(names, leaves, strict=True) if leaf is not None]
    state = jax.eval_shape(tx.init, params)
    found = sites(state, mirrors(state, params, tx))
    weights = [name for name, _ in present]
    sizes, shared = _bytes_by_weight(found, weights)
    adamw_sizes, _ = _bytes_by_weight(_sites(optax.adamw(1.0), params), weights)
    plans = {
        leaf.path: leaf
        for tracker in find_states(state, TrackerState)
        for leaf in tracker.plan.leaves
        if leaf.is_target
    }
    rows = []
    for path, array in present:
        plan = plans.get(path)
        rows.append(
            Row(
                path=path,
                shape=tuple(array.shape),
                dtype=jnp.dtype(array.dtype).name,
                view=_view_text(plan.view) if plan else "",
                side="both"
                if plan and plan.sides == (REDUCTION, OUTPUT)
                else "".join(plan.sides if plan else ()),
                rank=plan.rank if plan else 0,
                state_bytes=sizes[path],
                adamw_bytes=adamw_sizes[path],
                note=plan.note if plan else "",
            )
        )
    return Description(tuple(rows), shared, tuple(_notes(state, found)))


def _notes(state: PyTree, found: Sequence[Site]) -> list[str]:
    notes = []
    for node in find_states(state, SubspaceState):
        inside = [s for s in found if (id(node), "inner_state") in [(id(n), f) for n, f in s.trail]]
        for tracker in find_states(node.tracker_state, TrackerState):
            targets = {projection.path for projection in tracker.plan.projections}
            kept = kept_fields(inside, targets)
            if kept:
                notes.append(
                    f"note: {', '.join(kept)}: not recognised as moments, so kept as they are "
                    "when a basis changes"
                )
            if node.inner_state is None and targets:
                notes.append(
                    "note: without an inner optimizer this is a filter: what follows it in the "
                    "chain keeps full-sized state; pass the optimizer as inner= to save memory"
                )
    return notes
