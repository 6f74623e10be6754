"""Whole optimizer states: shown, placed on meshes, checked.

Level 6: stands on `_subspace`.
"""
