"""What several command lines share; how a user meets it is tested with the scripts."""

import argparse

import pytest

from running.arguments import by_name, refuse_alone
from running.checkpointing import open_runs
from running.errors import UserError


def test_a_value_of_ones_own_comes_before_that_for_all():
    usual = {"a": 1, "b": 2, "c": 3}
    assert by_name([], usual) == usual
    assert by_name([("b", 7)], usual) == {"a": 1, "b": 7, "c": 3}
    assert by_name([(None, 0), ("b", None)], usual) == {"a": 0, "b": None, "c": 0}


def test_the_option_that_is_missing_is_named():
    given, left_out = ({"log_every": 3, "log_dir": value} for value in ("here", None))
    refuse_alone(argparse.Namespace(**given), ("log_every",), "log_dir", "DIR")
    refuse_alone(argparse.Namespace(log_every=None, log_dir=None), ("log_every",), "log_dir")
    with pytest.raises(UserError, match=r"--log-every has no effect alone: add --log-dir DIR$"):
        refuse_alone(argparse.Namespace(**left_out), ("log_every",), "log_dir", "DIR")


def test_no_run_is_mixed_with_another(tmp_path):
    assert open_runs(None, {"a": {"seed": 0}}, resume=False) == {}
    opened = open_runs(tmp_path, {"a": {"seed": 0}, "b": {"seed": 1}}, resume=False)
    assert {name: one.directory for name, one in opened.items()} == {
        "a": tmp_path / "a",
        "b": tmp_path / "b",
    }
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(UserError, match="b' is not empty"):
        open_runs(tmp_path, {"a": {}, "b": {}}, resume=False)
