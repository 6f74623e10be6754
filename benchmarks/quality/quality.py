r"""Validation loss of many optimizers on byte-level language modelling, each at its best rate.

Every contender trains at the same number of learning rates, a factor of 2 apart, with three seeds
each; the rate with the best mean counts. Results are appended to a file of JSON lines, and what is
in it is not run again: the benchmark can be stopped at any time, run in pieces, and by several
processes.

  python -m benchmarks.quality.quality run --budget-minutes 60 --threads 1
  python -m benchmarks.quality.quality run --only sketched --only adamw
  python -m benchmarks.quality.quality plan
  python -m benchmarks.quality.quality report --plot benchmarks/results/quality.png

All runs of a contender train side by side in one program. On a GPU start several processes: most
of their time goes into compiling. A CPU gains nothing from lanes, so there tune with one seed,
about the best rates of ``quality.jsonl``:

  python -m benchmarks.quality.quality run --threads 1 --tuning-seeds 1 \
      --results benchmarks/results/quality_cpu.jsonl \
      --tuned-on benchmarks/results/quality.jsonl --stage large --only muon

Jobs come in a fixed order, the most telling first. Stages:

- ``small``: width 128, 4 layers, 400 steps of 8 × 128 bytes of the standard library's source;
  seven rates, up to two more where the best is at an end;
- ``long``: the same for 1600 steps; ``large``: width 256, 6 layers; ``regularized``: with clipping
  at 1 and weight decay 0.1; for the leading contenders of ``small`` and some others, at the best
  rate there and at half and twice that;
- ``time``: CPU time of a step, two refreshes in 100 steps included; with ``--threads 1``;
- ``english``: the text of a dictionary, likewise. It comes from a Debian package:

    apt-get download dict-gcide && dpkg-deb -x dict-gcide_*.deb gcide
    zcat gcide/usr/share/dictd/gcide.dict.dz | head -c 24000000 | tail -c 4000000 > english.txt
    python -m benchmarks.quality.quality run --english english.txt
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def limit_threads(threads: int, core: int | None) -> None:
    """Keeps JAX to one thread. It reads this when it starts, so nothing may have imported it."""
    if threads != 1:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    os.environ["OMP_NUM_THREADS"] = "1"
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def tasks(args: argparse.Namespace) -> dict[str, Any]:
    """The stages that can run."""
    from benchmarks.quality.training import Task

    small = Task(**args.task)
    changed = dataclasses.replace
    found = {
        "small": small,
        "long": changed(small, steps=4 * small.steps),
        "large": changed(small, width=2 * small.width, layers=small.layers * 3 // 2),
        "regularized": changed(small, clip=1.0, decay=0.1),
        "time": changed(small, steps=100),
    }
    if args.english:
        found["english"] = changed(small, corpus=args.english)
    return found


def following_jobs(results: dict[str, Any], stages: dict[str, Any], args: Any) -> Iterator[Any]:
    """What these arguments ask for that has not run."""
    from benchmarks.quality import jobs

    tuned = jobs.load(args.tuned_on) if args.tuned_on else None
    return jobs.pending(results, stages, args.only, tuned, jobs.SEEDS[: args.tuning_seeds])


def run(args: argparse.Namespace) -> None:
    """Runs pending jobs until none is left or the time is up."""
    import jax

    from benchmarks import harness
    from benchmarks.quality import jobs, training
    from benchmarks.quality.claims import Claims

    # A stage that only differs in its text shares its programs with another.
    jax.config.update("jax_compilation_cache_dir", str(args.results.with_suffix(".cache")))
    # GPUs would multiply with ten bits of mantissa.
    jax.config.update("jax_default_matmul_precision", "highest")

    stages = {n: t for n, t in tasks(args).items() if not args.stage or n in args.stage}
    claims, deadline = Claims(args.results), time.monotonic() + 60 * args.budget_minutes
    lock = args.results.with_suffix(".lock")
    longest, failed = 0.0, set()
    while time.monotonic() + longest < deadline:
        results = jobs.load(args.results)
        following = following_jobs(results, stages, args)
        job = next((j for j in following if j.key not in failed and claims.take(j)), None)
        if job is None:
            print("nothing left to start")
            return
        task, began = stages[job.stage], time.monotonic()
        rank = task.width // jobs.FRACTIONS[job.fraction] if job.fraction else 0
        try:
            # Another process may have finished it since.
            if job.key in jobs.load(args.results):
                continue
            found = training.run(job.name, task, rank, job.lanes, lock)
            about = {
                "stage": job.stage,
                "name": job.name,
                "fraction": job.fraction,
                "task": dataclasses.asdict(task) | {"corpus": pathlib.Path(task.corpus).name},
                "threads": args.threads,
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "on": f"{harness.versions('jax', 'optax')}, {jax.devices()[0].device_kind}",
            }
            lines = [
                {"key": jobs.key_of(job.stage, (job.name, job.fraction), rate, seed)}
                | about
                | {"rate": rate, "seed": seed}
                | result
                for (rate, seed), result in zip(job.lanes, found, strict=True)
            ]
            with args.results.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except Exception as error:  # One contender's failure must not end an hour's run.
            failed.add(job.key)
            print(f"{job.key}: FAILED, {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            claims.drop(job)
        longest = max(longest, time.monotonic() - began)
        losses = [line["val_loss"] for line in lines if line["val_loss"] is not None]
        best = f"{min(losses):.4f}" if losses else "all diverged"
        print(
            f"{job.key} and {len(lines) - 1} more: best {best}; "
            f"compiling {found[0]['compile_s']:.0f} s, training {found[0]['seconds']:.0f} s",
            flush=True,
        )


def plan(args: argparse.Namespace) -> None:
    """Prints what would run next, as far as it is known."""
    from benchmarks.quality import jobs

    results = jobs.load(args.results)
    following = list(following_jobs(results, tasks(args), args))
    print(f"{len(results)} runs are done; known to follow: {len(following)}")
    for job in following:
        print(f"{job.key} and {len(job.lanes) - 1} more")


def report(args: argparse.Namespace) -> None:
    """Prints a table for each stage and draws the plot."""
    from benchmarks.quality import jobs
    from benchmarks.quality import report as tables

    results = jobs.load(args.results)
    stages = ("small", "long", "large", "regularized", "english")
    found = {
        stage: {e: s for e in jobs.entries() if (s := jobs.summary(results, stage, e)) is not None}
        for stage in stages
    }
    for stage, rows in found.items():
        if rows:
            times = jobs.step_times(results)
            print(f"## {stage}\n\n{tables.stage_table(rows, times)}\n")
    if args.plot:
        drawn = {stage: rows for stage, rows in found.items() if len(rows) > 3}
        tables.draw(drawn, args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "plan", "report"])
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=RESULTS / "quality.jsonl",
        help="file of JSON lines",
    )
    parser.add_argument("--only", action="append", default=[], help="a contender; may be repeated")
    parser.add_argument("--stage", action="append", default=[], help="a stage; may be repeated")
    parser.add_argument(
        "--budget-minutes", type=float, default=1e6, help="start no job that ends later"
    )
    parser.add_argument(
        "--tuned-on",
        type=pathlib.Path,
        help="results whose best rates are the middle of three to try, instead of seven",
    )
    parser.add_argument(
        "--tuning-seeds",
        type=int,
        choices=[1, 2, 3],
        default=3,
        help="seeds that choose the rate; the others run at the best one alone",
    )
    parser.add_argument("--threads", type=int, choices=[0, 1], default=0, help="1 for one thread")
    parser.add_argument("--core", type=int, help="with --threads 1, the core to stay on")
    parser.add_argument("--english", default="", help="file with the English text")
    parser.add_argument(
        "--task", type=json.loads, default={}, help='changes of the small task, {"steps": 20}'
    )
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw the plot")
    args = parser.parse_args()
    limit_threads(args.threads, args.core)
    {"run": run, "plan": plan, "report": report}[args.command](args)


if __name__ == "__main__":
    main()
