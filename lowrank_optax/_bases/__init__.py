"""Bases: how they are found, stored and followed as the gradient moves.

Level 4: stands on `_plan`.
"""
