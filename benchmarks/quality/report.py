"""Tables and the plot of ``quality.py``."""

import pathlib
from typing import Any

from benchmarks import harness

_HEAD = (
    "optimizer",
    "rank",
    "validation loss",
    "− AdamW",
    "state ÷ AdamW",
    "step ÷ AdamW, CPU",
    "rate",
    "seeds",
)
# How a name begins -> the family in the legend, its colour and its marker.
_FAMILIES = (
    (("lowrank", "sketched"), "random basis + sketched residual", "#0b6e4f", "o"),
    (("fira",), "Fira's lift", "#3a86c8", "s"),
    (("apollo",), "APOLLO's lift", "#7b5ea7", "^"),
    (("galore", "random", "frozen", "logra"), "subspace alone", "#d98324", "D"),
    (("contrib", "flora", "lora", "ldadam", "lion"), "other low-rank methods", "#b23a48", "v"),
    (("",), "full-rank optimizers", "#555555", "X"),
)
_TITLES = {"small": "400 steps", "long": "1600 steps", "large": "twice as wide, 400 steps"}


def stage_table(rows: dict[tuple[str, str], Any], times: dict[tuple[str, str], float]) -> str:
    """A Markdown table, best first, for summaries and step times by entry."""
    yardstick = rows.get(("adamw", ""))
    cells = []
    for (name, fraction), s in sorted(rows.items(), key=lambda item: item[1].mean):
        versus = f"{s.mean - yardstick.mean:+.3f}" if yardstick is not None else ""
        time = times.get((name, fraction))
        cells.append(
            (
                name,
                fraction or "—",
                f"{s.mean:.3f} ± {s.error:.3f}" if s.seeds > 1 else f"{s.mean:.3f}",
                versus,
                f"{100 * s.state:.0f} %",
                "" if time is None else f"{time:.2f}",
                f"{s.rate:.2g}" + (" (end)" if s.at_end else ""),
                str(s.seeds),
            )
        )
    note = "“(end)”: the best rate is at an end of those tried."
    return harness.table(_HEAD, cells) + "\n\n" + note


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _panel(axes: Any, rows: dict[tuple[str, str], Any]) -> None:
    yardstick = rows[("adamw", "")]
    # Far above AdamW there is nothing to see.
    top = yardstick.mean + 0.06
    shown = {entry: s for entry, s in rows.items() if s.mean < top}
    for starts, family, colour, marker in _FAMILIES:
        members = [
            s
            for entry, s in shown.items()
            if next(f for f in _FAMILIES if entry[0].startswith(f[0]))[0] == starts
        ]
        if members:
            axes.errorbar(
                [100 * s.state for s in members],
                [s.mean for s in members],
                yerr=[s.error for s in members],
                fmt=marker,
                color=colour,
                ms=6,
                capsize=2,
                label=family,
            )
    line = front([(100 * s.state, s.mean) for s in shown.values()])
    axes.step(*zip(*line, strict=True), where="post", color="#999999", lw=1, zorder=0)
    axes.axhline(yardstick.mean, color="#999999", lw=0.8, ls=":", zorder=0)
    best = set(line)
    for (name, fraction), s in shown.items():
        if (100 * s.state, s.mean) in best or name.startswith(("adamw", "contrib")):
            right = s.state > 0.9
            axes.annotate(
                f"{name} {fraction}".strip(),
                (100 * s.state, s.mean),
                textcoords="offset points",
                xytext=(-7 if right else 7, -11),
                ha="right" if right else "left",
                fontsize=8,
            )
    axes.set_xlim(0, 105)
    axes.set_xlabel("optimizer state, % of AdamW's")
    axes.spines[["top", "right"]].set_visible(False)


def draw(stages: dict[str, dict[tuple[str, str], Any]], path: pathlib.Path) -> None:
    """Loss against state bytes, with the front of the best, one panel for each stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {stage: rows for stage, rows in stages.items() if rows and stage in _TITLES}
    figure, panels = pyplot.subplots(
        1, len(drawn), figsize=(5.5 * len(drawn), 5), constrained_layout=True, squeeze=False
    )
    for axes, (stage, rows) in zip(panels[0], drawn.items(), strict=True):
        _panel(axes, rows)
        axes.set_title(_TITLES[stage], fontsize=10)
    panels[0][0].set_ylabel("validation loss, nats a byte")
    panels[0][0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
