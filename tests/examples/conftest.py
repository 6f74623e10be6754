"""The examples are scripts: their folder, not a package, is what they import each other from."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
