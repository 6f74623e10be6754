"""The first script that a user runs."""

import pathlib
import re
import runpy

import jax
import pytest

import lowrank_optax as lro

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.mark.usefixtures("standard_promotion")
def test_it_says_what_is_projected_and_learns(capsys):
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]
    description = lro.describe(names["tx"], names["params"])
    assert str(description) in printed
    assert {row.path: row.rank for row in description.rows if row.rank} == {
        f"layers/{layer}/kernel": 32 for layer in range(4)
    }
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(names["opt_state"]))
    assert held < 0.5 * 8 * sum(leaf.size for leaf in jax.tree.leaves(names["params"]))
