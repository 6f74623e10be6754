"""Optimizers in NumPy and float64, for tests to compare with."""

import numpy as np


class Adam:
    """Adam in float64, with the moments of one target."""

    def __init__(self):
        self.m = self.v = self.t = 0

    def __call__(self, core):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * core
        self.v = 0.999 * self.v + 0.001 * core**2
        first, second = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return first / (np.sqrt(second) + 1e-8)


def factors(update, core, p, q, per):
    """‖u‖/‖C‖ for each channel, or for each matrix."""
    if per == "channel" and q is None:
        axis = (1,)
    elif per == "channel" and p is None:
        axis = (2,)
    else:
        axis = (1, 2)
    lengths = [np.sqrt(np.sum(x**2, axis=axis, keepdims=True)) for x in (update, core)]
    return lengths[0] / lengths[1]
