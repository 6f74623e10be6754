"""How Sphinx builds the site: ``sphinx-build -W --keep-going -b html docs site``."""

import json
import os
import pathlib

# Importing the package, for docstrings, must not look for accelerators.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import lowrank_optax

HERE = pathlib.Path(__file__).parent

project = "lowrank_optax"
author = "The lowrank_optax authors"
copyright = author
release = version = lowrank_optax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

# Every reference must lead somewhere: with -W one that does not stops the build. No inventory of
# another project is read, so a build needs no network; their names are not links.
nitpicky = True
nitpick_ignore_regex = [("py:exc", r"\w+(Error|Warning)")]

# Docstrings say in words what a value may be; defaults are shown as they are written.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False
napoleon_attr_annotations = False
maximum_signature_line_length = 80

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Notebooks are shown with the outputs they were saved with; the tests execute them.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = "lowrank_optax"
html_theme_options = {"show_toc_level": 2, "use_download_button": False}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]


def copy_notebooks() -> list[str]:
    """Copies the repository's notebooks to where Sphinx finds them, and names them."""
    target = HERE / "notebooks"
    for stale in target.glob("*.ipynb"):
        stale.unlink()
    names = []
    for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
        # On the site the pages that a notebook links to are one level nearer.
        content = json.loads(notebook.read_text().replace("](../docs/", "](../"))
        # Without it cells are not highlighted, which is a warning.
        content["metadata"].setdefault("language_info", {"name": "python"})
        (target / notebook.name).write_text(json.dumps(content))
        names.append(notebook.name)
    return names


NOTEBOOKS = copy_notebooks()


def without_empty_toctree(app, docname: str, source: list[str]) -> None:
    """A checkout without notebooks builds, too: a pattern that matches nothing is a warning."""
    if docname == "notebooks/index" and not NOTEBOOKS:
        source[0] = source[0].partition("```{toctree}")[0]


def setup(app) -> None:
    """Connects what Sphinx should call."""
    app.connect("source-read", without_empty_toctree)
