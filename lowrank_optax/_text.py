"""Tables and sizes for people."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table in columns of equal width.

    Args:
        head: the names of the columns.
        rows: the cells of each row.
        left: how many columns, from the first on, are aligned to the left; the others to the right.

    Returns:
        One line a row, without blanks at the ends.
    """
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(cells)
        ).rstrip()

    return "\n".join(map(aligned, lines))


def format_bytes(size: int | float) -> str:
    """A size for people: ``1.50 MB``, in powers of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.2f} {unit}"
    return f"{size / 1000:.2f} TB"
