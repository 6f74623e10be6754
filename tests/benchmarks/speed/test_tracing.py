"""The table of tracing times, and what is traced."""

import jax
import pytest

import lowrank_optax as lro
from benchmarks import harness
from benchmarks.speed import tracing


def test_the_exponent_tells_linear_from_quadratic_growth():
    assert tracing.exponents([1.0, 3.0], [2.0, 12.0], 50, 100) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("name", [n for n in tracing.OPTIMIZERS if n != "optax.adamw"])
def test_every_weight_is_projected(name):
    with jax.numpy_dtype_promotion("standard"):
        tx = tracing.make_optimizer(name, 8)
        described = lro.describe(tx, tracing.make_params(3))
    assert [row.rank for row in described.rows] == [8, 8, 8]


def test_two_versions_take_turns(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(harness.ROOT)
    (tmp_path / "lowrank_optax").symlink_to(harness.ROOT / "lowrank_optax")
    command = ["--optimizers", "optax.adamw", "--weights", "2", "4", "--rounds", "1"]
    tracing.main([*command, "--compile-up-to", "2", "--packages", ".", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "| optax.adamw" in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    packages = [".", str(tmp_path)]
    assert [row[1:3] for row in cells] == [[p, n] for n in ("2", "4") for p in packages]
    assert [row[5] == "—" for row in cells] == [True, True, False, False]
    assert [row[6] == "—" for row in cells] == [False, False, True, True]


def test_a_folder_without_the_library_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(harness.ROOT)
    with pytest.raises(SystemExit):
        tracing.main(["--packages", str(tmp_path)])
    assert "no lowrank_optax in" in capsys.readouterr().err
