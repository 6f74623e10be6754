"""Whole optimizer states: carried over to another optimizer.

Level 6: stands on `_subspace`.
"""
