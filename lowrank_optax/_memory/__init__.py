"""How much memory a training step takes.

Level 7: stands on everything, and nothing but the package itself imports it.
"""
