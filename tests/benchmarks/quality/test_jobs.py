"""Which runs the quality benchmark does next."""

import pytest

from benchmarks.quality import claims, jobs

ADAMW, MUON = ("adamw", ""), ("muon", "")


def results(stage, entry, losses):
    """Rows of one entry, from losses by rate and seed."""
    rows = {}
    for (rate, seed), loss in losses.items():
        key = jobs.key_of(stage, entry, rate, seed)
        rows[key] = {
            "stage": stage,
            "name": entry[0],
            "fraction": entry[1],
            "rate": rate,
            "seed": seed,
            "val_loss": loss,
            "state_bytes": 50,
            "adamw_bytes": 100,
        }
    return rows


def at_all_seeds(losses):
    return {(rate, seed): loss for rate, loss in losses.items() for seed in jobs.SEEDS}


def first(found, stages=("small",), only=("adamw",), **options):
    return next(iter(jobs.pending(found, dict.fromkeys(stages), list(only), **options)), None)


def test_a_fresh_contender_tries_the_grid_with_all_seeds():
    job = first({})
    middle = jobs.CONTENDERS["adamw"].rate
    assert {rate for rate, _ in job.lanes} == {middle * factor for factor in jobs.GRID}
    assert len(job.lanes) == len(jobs.GRID) * len(jobs.SEEDS)


def test_the_grid_grows_where_the_best_is_at_its_end():
    rates = [jobs.CONTENDERS["adamw"].rate * factor for factor in jobs.GRID]
    done = results("small", ADAMW, at_all_seeds({rate: 1 / rate for rate in rates}))
    assert {rate for rate, _ in first(done).lanes} == {2 * max(rates)}
    inside = results("small", ADAMW, at_all_seeds({r: abs(r - rates[3]) for r in rates}))
    assert first(inside) is None


def test_later_stages_run_about_the_best_rate():
    done = results("small", ADAMW, at_all_seeds({1e-3: 3.0, 2e-3: 2.0, 4e-3: None}))
    job = first(done, stages=("long",))
    assert {rate for rate, _ in job.lanes} == {1e-3, 2e-3, 4e-3}


def test_one_seed_tunes_and_the_others_run_at_the_best():
    elsewhere = results("small", ADAMW, at_all_seeds({1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}))
    options = {"stages": ("large",), "tuned": elsewhere, "tuning_seeds": (0,)}
    assert first({}, **options).lanes == ((1e-3, 0), (2e-3, 0), (4e-3, 0))
    done = results("large", ADAMW, {(1e-3, 0): 1.9, (2e-3, 0): 1.8, (4e-3, 0): 2.0})
    assert first(done, **options).lanes == ((2e-3, 1), (2e-3, 2))
    done |= results("large", ADAMW, {(2e-3, 1): 1.8, (2e-3, 2): 1.7})
    assert first(done, **options) is None
    summary = jobs.summary(done, "large", ADAMW)
    assert (summary.rate, summary.seeds) == (2e-3, 3)
    assert summary.mean == pytest.approx((1.8 + 1.8 + 1.7) / 3)


def test_an_own_small_stage_tunes_before_another_machine_does():
    elsewhere = results("small", MUON, at_all_seeds({1e-2: 1.0}))
    own = results("small", MUON, at_all_seeds({1e-3: 1.0}))
    job = first(own, stages=("large",), only=("muon",), tuned=elsewhere, tuning_seeds=(0,))
    assert [rate for rate, _ in job.lanes] == [5e-4, 1e-3, 2e-3]


def test_a_claim_of_a_process_that_died_is_void(tmp_path, monkeypatch):
    job = first({})
    mine = claims.Claims(tmp_path / "results.jsonl")
    assert mine.take(job)
    assert not claims.Claims(tmp_path / "results.jsonl").take(job)
    monkeypatch.setattr(claims, "_alive", lambda process: False)
    assert mine.take(job)
    mine.drop(job)
    assert not list((tmp_path / "results.running").iterdir())
