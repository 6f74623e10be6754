"""The backward pass that makes cores and no full gradients.

Level 6: stands on `_subspace`.
"""
