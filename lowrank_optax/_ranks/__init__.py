"""Which rank a weight needs.

Level 6: stands on `_subspace`.
"""
