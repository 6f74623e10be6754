"""Tables and sizes for people."""


def format_bytes(size: int) -> str:
    """A size for people: ``1.50 MB``, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size} B" if unit == "B" else f"{size:.2f} {unit}"
        size = size / 1000  # type: ignore[assignment]
    raise AssertionError
