"""The figure of :class:`RankProbe`: how fast singular values decay, by class of leaves."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowrank_optax.targets import CLASSES, leaf_class


def draw_decay(curves: Mapping[str, tuple[np.ndarray, int]], title: str) -> Any:
    """One panel a class that occurs; one line a matrix, with a dot at its leaf's rank.

    Args:
        curves: by path, singular values ``(*batch, k)`` and the rank that is needed.
        title: of the figure.

    Returns:
        A matplotlib figure.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "RankProbe.plot needs matplotlib: pip install 'lowrank-optax[plot]'"
        ) from error
    classes = [name for name in CLASSES if any(leaf_class(path) == name for path in curves)]
    # Figure, and not pyplot, which would keep it alive and want a display.
    figure = Figure(figsize=(1 + 3.2 * len(classes), 3.6), layout="constrained")
    panels = figure.subplots(1, len(classes), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, classes, strict=True):
        for path, (spectrum, rank) in curves.items():
            if leaf_class(path) != name:
                continue
            rows = spectrum.reshape(-1, spectrum.shape[-1])
            share = np.arange(1, rows.shape[-1] + 1) / rows.shape[-1]
            for row in rows:
                panel.plot(share, np.where(row > 0, row, np.nan), linewidth=0.8, alpha=0.7)
            neediest = np.nanmax(rows[:, rank - 1])
            panel.plot(share[rank - 1], neediest or np.nan, "k.", markersize=4)
        panel.set(title=name, xlabel="share of the side", yscale="log")
    panels[0].set_ylabel("singular value ÷ largest")
    figure.suptitle(title, fontsize="medium")
    return figure
