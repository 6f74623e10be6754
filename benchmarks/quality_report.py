"""Tables and the plot of ``quality.py``."""

import pathlib
from typing import Any

import harness

_HEAD = (
    "optimizer",
    "rank",
    "validation loss",
    "− AdamW",
    "state ÷ AdamW",
    "step ÷ AdamW",
    "rate",
    "seeds",
)
# Colours of families, the darkest for what this library adds.
_FAMILIES = (
    ("sketched", "#0b6e4f", "o"),
    ("fira", "#3a86c8", "s"),
    ("apollo", "#7b5ea7", "^"),
    ("galore", "#d98324", "D"),
    ("random", "#d98324", "v"),
    ("frozen", "#d98324", "P"),
    ("", "#555555", "X"),
)


def _label(entry: tuple[str, str]) -> str:
    return " ".join(entry).strip()


def stage_table(rows: dict[tuple[str, str], Any]) -> str:
    """A Markdown table, best first, for summaries by entry."""
    yardstick = rows.get(("adamw", ""))
    cells = []
    for (name, fraction), s in sorted(rows.items(), key=lambda item: item[1].mean):
        versus, cost = "", ""
        if yardstick is not None:
            versus = f"{s.mean - yardstick.mean:+.3f}"
            cost = f"{s.row['step_ms'] / yardstick.row['step_ms']:.2f}"
        cells.append(
            (
                name,
                fraction or "—",
                f"{s.mean:.3f} ± {s.error:.3f}" if s.seeds > 1 else f"{s.mean:.3f}",
                versus,
                f"{100 * s.state:.0f} %",
                cost,
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


def draw(rows: dict[tuple[str, str], Any], path: pathlib.Path) -> None:
    """Loss against state bytes, with the front of the best, as an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), constrained_layout=True)
    finite = {entry: s for entry, s in rows.items() if s.mean < float("inf")}
    for entry, s in finite.items():
        family = next(f for f in _FAMILIES if f[0] in entry[0])
        axes.errorbar(
            100 * s.state, s.mean, yerr=s.error, color=family[1], marker=family[2], ms=6, capsize=2
        )
    line = front([(100 * s.state, s.mean) for s in finite.values()])
    best = set(line)
    axes.step(*zip(*line, strict=True), where="post", color="#999999", lw=1, zorder=0)
    plain = {e for e in finite if e[0] in ("adamw", "galore", "fira", "sketched", "contrib.galore")}
    axes.set_xlim(0, 112)
    labelled = [
        (100 * s.state, s.mean, _label(entry))
        for entry, s in finite.items()
        if entry in plain or (100 * s.state, s.mean) in best
    ]
    taken: list[tuple[float, float]] = []
    for x, y, text in sorted(labelled):
        right, up = axes.transData.transform((x, y))
        # Labels of neighbours one above the other.
        while any(abs(right - r) < 110 and abs(up - u) < 13 for r, u in taken):
            up += 4
        taken.append((right, up))
        place = axes.transData.inverted().transform((right, up))
        axes.annotate(
            text, place, textcoords="offset points", xytext=(7, 3), fontsize=8, va="baseline"
        )
    axes.set_xlabel("optimizer state, % of AdamW's")
    axes.set_ylabel("validation loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
