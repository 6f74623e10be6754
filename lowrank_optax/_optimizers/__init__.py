"""Optimizers by name, one file a method.

Level 6: stands on `_subspace`.
"""
