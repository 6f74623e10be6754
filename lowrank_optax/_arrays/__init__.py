"""Arrays and trees of them, which know of no subspace.

Level 2: stands on `_checks` and `_text`.
"""
