"""Which leaf is projected, and how it is read as matrices.

Level 3: stands on `_arrays`.
"""
