"""The benchmarks are scripts beside each other, not a package."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
