"""Reinforcement learning with verifiable rewards: AdamW, GaLore and LoGRA over seeds.

  python -m benchmarks.checkpoints.rl_seeds                      # both tasks, three seeds
  python -m benchmarks.checkpoints.rl_seeds --tasks paths --seeds 0 1 2 3 4
  python -m benchmarks.checkpoints.rl_seeds --budget-minutes 30  # starts nothing after that
  python -m benchmarks.checkpoints.rl_seeds --table              # only prints what there is

Each run adds one JSON line to ``--out``, and runs that are there already are not repeated: stop
it whenever you like and start it again. The runs of one seed start from the same supervised
parameters, which are kept beside the results.
"""

import argparse
import io
import json
import pathlib
import pickle
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import harness
from reinforcement import experiment as experiments
from reinforcement import options as command_line
from rl import run_one

CASES = {
    "paths": {
        "adamw": "--optimizer adamw",
        "galore, rank 24": "--optimizer galore --rank 24",
        "galore, rank 6": "--optimizer galore --rank 6",
        "logra, rank 24": "--optimizer logra --rank 24",
        "galore, rank 24, progressive": "--optimizer galore --rank 24 --progressive 20",
        "galore, rank 24, matrix-free": "--optimizer galore --rank 24 --matrix-free",
    },
    "addition": {
        "adamw": "--optimizer adamw",
        "galore, rank 24": "--optimizer galore --rank 24",
        "galore, rank 6": "--optimizer galore --rank 6",
        "logra, rank 24": "--optimizer logra --rank 24",
        "adamw at 2e-3, no KL": "--optimizer adamw --lr 2e-3 --kl 0 --collapse 0",
        "adamw at 2e-3, no KL, guarded": "--optimizer adamw --lr 2e-3 --kl 0",
        "galore at 6e-3, no KL": "--optimizer galore --lr 6e-3 --kl 0 --collapse 0",
        "galore at 6e-3, no KL, guarded": "--optimizer galore --lr 6e-3 --kl 0",
    },
}
"""By task and name, the options of `examples/rl.py`."""


def prepare(task: str, seed: int, options: str, extra: list[str]) -> experiments.Experiment:
    words = ["--task", task, "--seed", str(seed), *options.split(), *extra]
    return experiments.prepare(command_line.make_parser(None).parse_args(words))


def supervised(experiment: experiments.Experiment, folder: pathlib.Path, console: Console):
    """Parameters after supervised training, from the folder or made now."""
    wanted = experiments.supervised_fingerprint(experiment)
    path = folder / f"{experiment.args.task}-{experiment.args.seed}.pickle"
    if path.exists():
        config, params = pickle.loads(path.read_bytes())
        if config == wanted:
            return jax.tree.map(jnp.asarray, params)
    params = experiments.supervise(experiment, None, console)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((wanted, jax.device_get(params))))
    return params


def read(path: pathlib.Path) -> list[dict]:
    """Complete lines; the last one may be torn."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def measure(experiment: experiments.Experiment, reference, console: Console) -> dict:
    """Runs one case: what a line of the results holds."""
    (name,) = experiment.args.optimizer
    outcome = []
    wall, cpu = harness.timed(
        lambda: outcome.append(run_one(experiment, name, reference, None, console))
    )
    (result,) = outcome
    return {
        "before": result.before,
        "after": result.after,
        "iterations": experiment.args.iterations,
        "to_0.9": result.reached,
        "restores": result.restores,
        "state_bytes": result.state_bytes,
        "wall_s": wall,
        "cpu_s": cpu,
        "iteration_s": result.seconds,
    }


def print_table(records: list[dict]) -> None:
    """One table a task: the median over seeds, and the lowest and highest score."""
    for task, cases in CASES.items():
        rows = []
        for case in cases:
            runs = [r for r in records if (r["task"], r["case"]) == (task, case)]
            if not runs:
                continue
            after = [run["after"] for run in runs]
            reached = [run["to_0.9"] for run in runs if run["to_0.9"]]
            middle = {
                key: statistics.median(run[key] for run in runs)
                for key in ("before", "after", "state_bytes", "cpu_s", "restores")
            }
            rows.append(
                [
                    case,
                    str(len(runs)),
                    f"{middle['before']:.3f}",
                    f"{middle['after']:.3f} ({min(after):.3f}–{max(after):.3f})",
                    f"{statistics.median(reached):g}"
                    if len(reached) == len(runs)
                    else f"{len(reached)} of {len(runs)} did",
                    f"{middle['restores']:g}",
                    f"{middle['state_bytes']:,.0f}",
                    f"{middle['cpu_s']:.0f}",
                ]
            )
        if rows:
            head = ("optimizer", "seeds", "before", "after (range)", "iterations to .9")
            print(f"\n{task}")
            print(harness.table((*head, "restores", "state bytes", "CPU s"), rows), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cases", nargs="+", help="names of the rows (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("rl.jsonl"))
    parser.add_argument("--budget-minutes", type=float, help="start no run after this time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--extra", default="", help="options of examples/rl.py for every run")
    args = parser.parse_args(argv)
    known = {case for task in args.tasks for case in CASES[task]}
    unknown = sorted(set(args.cases or ()) - known)
    if unknown:
        parser.error(f"--cases: {unknown[0]!r} is none of {', '.join(map(repr, sorted(known)))}")
    began = time.monotonic()
    console = Console(file=io.StringIO())
    todo = [
        (seed, task, case)
        for seed in args.seeds
        for task in args.tasks
        for case in CASES[task]
        if not args.table and (args.cases is None or case in args.cases)
    ]
    print(harness.versions("jax", "jaxlib", "optax", "lowrank-optax"))
    for seed, task, case in todo:
        key = {"task": task, "case": case, "seed": seed, "extra": args.extra}
        if any(key.items() <= record.items() for record in read(args.out)):
            continue
        if args.budget_minutes is not None and time.monotonic() - began > 60 * args.budget_minutes:
            print("the budget is spent; start again to go on")
            break
        experiment = prepare(task, seed, CASES[task][case], args.extra.split())
        reference = supervised(experiment, args.out.with_suffix(".starts"), console)
        record = key | measure(experiment, reference, console)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            print(json.dumps(record), file=file)
        reached = record["to_0.9"] or "–"
        print(
            f"{task}, {case}, seed {seed}: {record['before']:.3f} → {record['after']:.3f}, .9 "
            f"after {reached}, {record['cpu_s']:.0f} CPU s",
            flush=True,
        )
    print_table([record for record in read(args.out) if record["extra"] == args.extra])


if __name__ == "__main__":
    main()
