"""One update in a subspace: track, encode, carry, update, lift.

Level 5: stands on `_bases` and `_inner`, which meet here.
"""
