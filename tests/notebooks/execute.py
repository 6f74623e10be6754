"""Runs notebooks from a clean kernel.

python tests/notebooks/execute.py notebooks/*.ipynb

runs them in full and writes their outputs back, without traces of the time and the machine.
"""

import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]


def execute(
    notebook: nbformat.NotebookNode, variables: Mapping[str, str] = {}, timeout: int = 900
) -> None:
    """Runs all cells in order, in a kernel of its own, as in a clone of this repository.

    Args:
        notebook: gets the outputs.
        variables: added to the kernel's environment.
        timeout: seconds for a cell.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    with tempfile.TemporaryDirectory() as settings:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A folder without anybody's IPython settings, and figures that go into the notebook.
        kernel = os.environ | {"PYTHONPATH": path, "IPYTHONDIR": settings} | dict(variables)
        kernel.pop("MPLBACKEND", None)
        NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(ROOT / "notebooks")}},
        ).execute(env=kernel)
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel adds its version


def main(paths: list[str]) -> None:
    """Runs notebooks in place."""
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
