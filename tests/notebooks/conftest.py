"""The runner has no examples to test, and cannot be imported without the notebooks extra."""

collect_ignore = ["execute.py"]
