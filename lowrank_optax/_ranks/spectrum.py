"""Singular values of gradients, from Gram matrices that are summed over batches."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lowrank_optax._arrays.contract import REFRESH_PRECISION, contract, wide_dtype
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._bases.find import is_usable
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import OUTPUT, REDUCTION, View

METRICS = ("energy", "nuclear")


@dataclasses.dataclass(frozen=True)
class LeafSpectrum:
    """What :func:`rank_probe` found of one leaf.

    Attributes:
        leaf: its plan: path, view and side.
        spectrum: singular values in descending order, ``(*batch axes, size of the side)``, in
            units of the largest; the mean over batches in the mode ``"per_batch"``. Of a
            two-sided target, the side that needs the larger rank.
        rank: the smallest rank that holds the asked share, for the neediest matrix of a stack
            (and, per batch, in every batch).
        batches: how many batches had a finite gradient that is not 0.
    """

    leaf: Projection
    spectrum: np.ndarray
    rank: int
    batches: int


def needed_ranks(spectrum: np.ndarray, share: float, metric: str) -> np.ndarray:
    r"""The smallest r whose leading singular values hold a share of the whole.

    .. math:: \sum_{i \le r} \sigma_i^p \ge \mathrm{share} \sum_i \sigma_i^p

    with p = 2 for ``"energy"`` and 1 for ``"nuclear"``.

    Args:
        spectrum: singular values in descending order on the last axis.
        share: in (0, 1].
        metric: ``"energy"`` or ``"nuclear"``.

    Returns:
        Ranks, at least 1, one for each spectrum.
    """
    weights = spectrum**2 if metric == "energy" else spectrum
    sums = np.cumsum(weights, axis=-1)
    # Sums of floats may come out a hair short of the share that they hold.
    enough = sums >= share * sums[..., -1:] * (1 - 1e-12)
    return np.asarray(np.argmax(enough, axis=-1) + 1)


def gram_of(gradient: Float[Array, "..."], view: View, side: str) -> Array:
    """``G Gᵀ`` or ``Gᵀ G``: ``(*batch, *side, *side)``."""
    labels = "abcdefghijklmnopqrstuvwxyz"[: gradient.ndim]
    axes = view.side_axes(side)
    other = labels
    for axis in axes:
        other = other.replace(labels[axis], labels[axis].upper())
    batch = "".join(labels[axis] for axis in view.batch_axes)
    here = "".join(labels[axis] for axis in axes)
    return contract(
        f"{labels},{other}->{batch}{here}{here.upper()}",
        gradient,
        gradient,
        precision=REFRESH_PRECISION,
    )


def singular_values(gram: Array, view: View, side: str) -> np.ndarray:
    """The square roots of a Gram matrix's eigenvalues, descending, in float64."""
    size = view.rows if side == REDUCTION else view.columns
    matrix = np.asarray(gram, np.float64).reshape(*view.batch_shape, size, size)
    values = np.linalg.eigvalsh(matrix)[..., ::-1]
    # Below this an eigenvalue is rounding error of the float32 sums that made the matrix.
    floor = np.finfo(np.float32).eps * np.maximum(values[..., :1], 0)
    return np.sqrt(np.where(values > floor, values, 0))


class SpectrumSum:
    """The Gram matrices of one leaf; nothing of the size of a gradient is kept.

    Args:
        leaf: its plan.
        pooled: whether batches are added up, or looked at one by one.
    """

    def __init__(self, leaf: Projection, pooled: bool):
        self.leaf, self.view, self.pooled = leaf, leaf.view, pooled
        self.sides = leaf.sides
        if not pooled:
            # One gradient has the same singular values seen from either side.
            smaller = REDUCTION if leaf.view.rows <= leaf.view.columns else OUTPUT
            self.sides = (smaller,)
        self.unit: Any = None
        self.grams: dict[str, Any] = {}
        self.spectra: list[np.ndarray] = []
        self.batches = 0

    def add(self, gradient: object) -> None:
        """Takes in one batch's gradient; one that is not finite, or 0, is passed over."""
        gradient = jnp.asarray(gradient)
        if not is_usable(gradient):
            return
        self.batches += 1
        if self.unit is None or not self.pooled:
            # Squares of entries must neither overflow nor vanish.
            self.unit = jnp.max(jnp.abs(gradient)).astype(wide_dtype(gradient))
        for side in self.sides:
            gram = gram_of(gradient.astype(self.unit.dtype) / self.unit, self.view, side)
            if not self.pooled:
                self.spectra.append(singular_values(gram, self.view, side))
            elif side in self.grams:
                self.grams[side] += place_like(gram, self.grams[side])
            else:
                self.grams[side] = gram

    def result(self, share: float, metric: str) -> LeafSpectrum:
        """The spectrum of what was seen, and the rank that holds a share of it."""
        if self.pooled and self.grams:
            spectra = [singular_values(g, self.view, side) for side, g in self.grams.items()]
        else:
            spectra = self.spectra
        if not spectra:
            size = min(self.view.rows, self.view.columns)
            return LeafSpectrum(self.leaf, np.zeros((*self.view.batch_shape, size)), 1, 0)
        # A matrix of a stack whose gradient is always 0 needs nothing.
        ranks = [int(np.max(needed_ranks(s, share, metric))) for s in spectra]
        scaled = [s / np.where(s[..., :1] > 0, s[..., :1], 1) for s in spectra]
        spectrum = scaled[int(np.argmax(ranks))] if self.pooled else np.mean(scaled, axis=0)
        return LeafSpectrum(self.leaf, spectrum, max(ranks), self.batches)
