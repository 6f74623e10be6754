"""How many directions gradients need: ``rank_probe``."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.compact import Compact
from lowrank_optax._arrays.tree import PyTree
from lowrank_optax._checks import check_choice, check_rank
from lowrank_optax._plan.make_plan import make_plan
from lowrank_optax._plan.plan import Plan
from lowrank_optax._plan.target import Table, as_target, is_entry, is_table
from lowrank_optax._ranks import rules
from lowrank_optax._ranks.plot import draw_decay
from lowrank_optax._ranks.spectrum import METRICS, LeafSpectrum, SpectrumSum
from lowrank_optax._text import table

MODES = ("pooled", "per_batch")


@dataclasses.dataclass(frozen=True)
class RankProbe:
    """What :func:`rank_probe` returns; ``print`` it for a table.

    Attributes:
        leaves: one :class:`LeafSpectrum` for each probed leaf, by path.
        energy: the share that was asked for.
        metric: of what, ``"energy"`` or ``"nuclear"``.
        mode: ``"pooled"`` or ``"per_batch"``.
        batches: how many batches were seen.
    """

    leaves: Mapping[str, LeafSpectrum]
    energy: float
    metric: str
    mode: str
    batches: int

    @property
    def ranks(self) -> dict[str, int]:
        """The rank that each leaf needs."""
        return {path: found.rank for path, found in self.leaves.items()}

    def targets(
        self, *, multiple: int = 1, cap: int | float = 1.0, others: Sequence[Any] = ()
    ) -> list[tuple[str, Any]]:
        """The ranks as a table for ``targets=``.

        Args:
            multiple: rounds ranks up to a multiple of this. Leaves of equal shape and rank
                share a compiled computation, and hardware likes multiples of 8 or more.
            cap: the largest rank; a float is a fraction of the smaller matrix side.
            others: rules for what was not probed, such as ``lro.targets.default()``; by
                default it is trained full-rank.

        Returns:
            One rule for each probed leaf that matches its path alone, then ``others``.

        Raises:
            ValueError: if ``multiple`` or ``cap`` is out of range.
        """
        check_rank(cap, "RankProbe.targets: cap")
        if multiple < 1:
            raise ValueError(f"RankProbe.targets: multiple={multiple} must be at least 1")
        ranks = {}
        for path, found in self.leaves.items():
            view = found.leaf.view
            smaller = min(view.rows, view.columns)
            most = max(1, round(cap * smaller)) if isinstance(cap, float) else int(cap)
            rank = math.ceil(found.rank / multiple) * multiple
            ranks[path] = min(rank, most, smaller)
        return [
            *rules.rank_rules([found.leaf for found in self.leaves.values()], ranks),
            *others,
        ]

    def plot(self, path: Any = None) -> Any:
        """Draws the decay of the singular values, one panel for each class of leaves.

        Args:
            path: where to save the figure, if anywhere.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: without matplotlib.
        """
        curves = {name: (found.spectrum, found.rank) for name, found in self.leaves.items()}
        share = f"{self.energy:.2%} of the {_NOUNS[self.metric]}, {self.mode}"
        figure = draw_decay(curves, f"rank that holds {share}: dots")
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        head = ("leaf", "matrix", "rank", "of", "share", "σ at rank")
        rows: list[tuple[str, ...]] = []
        for path, found in self.leaves.items():
            view = found.leaf.view
            stack = "".join(f"{size} x " for size in view.batch_shape)
            smaller = min(view.rows, view.columns)
            last = np.max(found.spectrum[..., min(found.rank, found.spectrum.shape[-1]) - 1])
            rows.append(
                (
                    path,
                    f"{stack}{view.rows}x{view.columns}",
                    str(found.rank),
                    str(smaller),
                    f"{found.rank / smaller:.0%}",
                    f"{last:.1e}" if found.batches else "no gradient",
                )
            )
        asked = f"{self.energy:.2%} of the {_NOUNS[self.metric]}, {self.mode}"
        return "\n".join(
            [table(head, rows, left=2), f"ranks hold {asked}, over {self.batches} batches"]
        )


_NOUNS = {"energy": "energy (Σσ²)", "nuclear": "nuclear norm (Σσ)"}


def _without_rank(entry: Any, path: str) -> Any:
    """A target with its rank left open, so that no rank hides a leaf from the probe."""
    target = as_target(entry, path)
    return None if target is None else dataclasses.replace(target, rank=None)


def _without_ranks(targets: Any) -> Any:
    if targets is None:
        return None
    if callable(targets):
        return lambda path, leaf: _without_rank(targets(path, leaf), path)
    if is_table(targets):
        table = Table(targets)  # which reports what is no rule
        pairs = zip(targets, table.rules, strict=True)
        return [(rule[0], _without_rank(target, rule[0])) for rule, (_, target) in pairs]
    return jax.tree.map(lambda entry: _without_rank(entry, "targets"), targets, is_leaf=is_entry)


def _gradient_leaves(plan: Plan, gradients: PyTree, number: int) -> list[Any]:
    paths, leaves, _ = tree.flatten_with_paths(gradients)
    if paths != [leaf.path for leaf in plan.leaves]:
        odd = sorted({leaf.path for leaf in plan.leaves} ^ set(paths))
        where = f" at {odd[0]!r}" if odd else ""
        raise ValueError(
            f"rank_probe: the gradients of batch {number} have another structure than those of "
            f"batch 0{where}; yield one tree like params a batch"
        )
    for leaf, array in zip(plan.leaves, leaves, strict=True):
        if isinstance(array, Compact):
            raise ValueError(
                f"rank_probe: {leaf.path!r}: got a compact gradient, which lies in a basis "
                "already; use jax.grad"
            )
        if array is not None and tuple(unbox(array).shape) != leaf.shape:
            raise ValueError(
                f"rank_probe: {leaf.path!r}: got shape {tuple(unbox(array).shape)} in batch "
                f"{number}, expected {leaf.shape} as in batch 0"
            )
    return [unbox(array) for array in leaves]


def rank_probe(
    grads_iter: Iterable[Any],
    energy: float = 0.995,
    metric: str = "energy",
    mode: str = "pooled",
    targets: Any = None,
) -> RankProbe:
    r"""Measures which rank each leaf's gradients need, over some batches.

    For each matrix the smallest r with

    .. math:: \sum_{i \le r} \sigma_i^p \ge \mathrm{energy} \sum_i \sigma_i^p

    where p is 2 for ``metric="energy"`` and 1 for ``"nuclear"``, the stricter reading of "share
    of the singular values".

    Args:
        grads_iter: yields gradient trees, one a batch; about 100 of them at a fixed or slowly
            moving set of params. Only Gram matrices of the basis's side are kept, in float32
            (singular values below 3.5e-4 of the largest cannot be told from rounding there,
            and count as 0), so it may be a generator over any number of batches. A generator
            that computes each gradient when it is asked for one never holds two.
        energy: the share, in (0, 1].
        metric: ``"energy"`` (sum of squares) or ``"nuclear"`` (plain sum).
        mode: ``"pooled"`` (default) takes the singular values of all batches' gradients side by
            side, since a basis persists over batches; ``"per_batch"`` those of each batch
            alone, of which the neediest counts. The former is the larger by far where batches
            are small: it counts their noise, which a basis of any one batch fits.
        targets: which leaves to look at, and by which views and sides, as for
            :func:`refresh_basis`. Ranks in it are ignored. ``lro.targets.logra()`` includes
            embeddings and the head, on their d side.

    Returns:
        A :class:`RankProbe`, with ``print(probe)``, ``probe.plot()``, ``probe.ranks``, and
        ``probe.targets()`` for ``targets=``. A stack of layers or experts is one leaf with
        one rank, that of its neediest matrix. ``lro.targets.logra()`` is a table that needs no
        probe.

    Raises:
        ValueError: if there are no batches, a tree does not fit, or a choice is misspelled.
        TypeError: if ``grads_iter`` is one tree and not an iterable of them.

    Example:
        >>> import jax, jax.numpy as jnp, lowrank_optax as lro
        >>> def grads():
        ...     for seed in range(20):
        ...         x, y = jax.random.normal(jax.random.key(seed), (2, 32, 3))
        ...         yield {"kernel": jnp.eye(16, 3) @ (x.T @ y) @ jnp.eye(3, 24)}
        >>> probe = lro.rank_probe(grads(), energy=0.99)
        >>> print(probe)
        leaf    matrix  rank  of  share  σ at rank
        kernel  16x24      3  16    19%    8.9e-01
        ranks hold 99.00% of the energy (Σσ²), pooled, over 20 batches
        >>> tx = lro.galore_adamw(1e-2, targets=probe.targets(multiple=4))
    """
    if isinstance(energy, bool) or not 0 < energy <= 1:
        raise ValueError(f"rank_probe: energy={energy!r} is a share, in (0, 1]")
    check_choice("rank_probe: metric", metric, METRICS)
    check_choice("rank_probe: mode", mode, MODES)
    if isinstance(grads_iter, Mapping) or hasattr(grads_iter, "shape"):
        raise TypeError(
            "rank_probe: grads_iter must yield one gradient tree a batch, got a single tree; pass "
            "[grads], or a generator such as (grad_fn(params, batch) for batch in batches)"
        )
    plan, accumulators, number = Plan(), [], 0
    for number, gradients in enumerate(grads_iter, 1):
        if number == 1:
            plan = make_plan(gradients, _without_ranks(targets), 1, "smaller")
            if not plan.projections:
                raise ValueError(
                    "rank_probe: none of these leaves has a matrix to probe: "
                    f"{[leaf.path for leaf in plan.leaves][:4]}; pass targets"
                )
            accumulators = [SpectrumSum(p, mode == "pooled") for p in plan.projections]
        leaves = _gradient_leaves(plan, gradients, number - 1)
        for projection, accumulator in zip(plan.projections, accumulators, strict=True):
            accumulator.add(leaves[projection.index])
    if number == 0:
        raise ValueError(
            "rank_probe: grads_iter yielded no gradients; a generator can be consumed only once"
        )
    found = {a.leaf.path: a.result(float(energy), metric) for a in accumulators}
    return RankProbe(found, float(energy), metric, mode, number)
