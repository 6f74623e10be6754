"""How long a train step takes, by optimizer.

Each contender has a process of its own and trains the same decoder from the same start. They
take turns, and each round compares every contender with the AdamW of its own framework.

  python -m benchmarks.speed.step_time --rounds 10 --json step_time.json

Three things are timed: a train step (forward, backward, update; compiled with donation in JAX,
eager in PyTorch), the update alone, and an update that refreshes every basis. The amortized
step is ``step + (refresh - update) / 200``.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from benchmarks import harness
from benchmarks.plain_decoder import Size

EVERY = 200
CLOCKS = ("wall", "cpu")
# Contender: its worker, and the contender that it is compared with.
CONTENDERS = {
    "optax.adamw": ("benchmarks.speed.step_time_jax", "optax.adamw"),
    "lro.galore_adamw": ("benchmarks.speed.step_time_jax", "optax.adamw"),
    "optax.contrib.galore": ("benchmarks.speed.step_time_jax", "optax.adamw"),
    "torch.optim.AdamW": ("benchmarks.speed.step_time_torch", "torch.optim.AdamW"),
    "galore_torch": ("benchmarks.speed.step_time_torch", "torch.optim.AdamW"),
}


def start_workers(args) -> dict[str, harness.Worker]:
    workers = {}
    for name in args.contenders:
        module, _ = CONTENDERS[name]
        python = args.torch_python if "torch" in module else sys.executable
        options = ["--size", json.dumps(dataclasses.asdict(args.size)), "--rank", str(args.rank)]
        try:
            command = harness.command(module, name, *options, python=python)
            workers[name] = harness.Worker(command)
        except RuntimeError as error:
            print(f"left out: {error}", file=sys.stderr)
    return workers


def measure(workers: dict[str, harness.Worker], args) -> dict[str, dict[str, list]]:
    """Wall and CPU seconds of each run, by contender and task: one list a round."""
    times = {name: {task: [] for task in worker.about["tasks"]} for name, worker in workers.items()}
    for turn in range(args.rounds):
        # Every other round backwards, so that nobody always runs after the same neighbour.
        order = list(workers) if turn % 2 == 0 else list(workers)[::-1]
        for task in ("step", "update", "refresh"):
            if task == "refresh" and turn >= args.refreshes:
                continue
            for name in order:
                if task in times[name]:
                    repeats = 1 if task == "refresh" else args.repeats
                    times[name][task].append(workers[name].run(task, repeats))
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    return times


def summarize(times, clock: str) -> dict[str, dict[str, harness.Spread]]:
    """Quartiles over rounds of the best time in each, and of ratios to the baseline's."""
    which = CLOCKS.index(clock)
    best = {
        name: {
            task: [min(run[which] for run in turn) for turn in rounds]
            for task, rounds in tasks.items()
        }
        for name, tasks in times.items()
    }
    summary = {}
    for name, tasks in best.items():
        row = {task: harness.Spread.of(values) for task, values in tasks.items()}
        base = best.get(CONTENDERS[name][1])
        for task in ("step", "update"):
            if base is not None:
                pairs = zip(tasks[task], base[task], strict=True)
                row[f"{task}_ratio"] = harness.Spread.of([ours / theirs for ours, theirs in pairs])
        if base is not None:
            extra = 0.0
            if "refresh" in row:
                extra = (row["refresh"].median - row["update"].median) / EVERY
            pairs = zip(tasks["step"], base["step"], strict=True)
            amortized = [(ours + extra) / theirs for ours, theirs in pairs]
            row["amortized_ratio"] = harness.Spread.of(amortized)
        summary[name] = row
    return summary


def print_table(summary) -> None:
    def cell(row, key, scale=1.0, spec=".2f"):
        if key not in row:
            return "—"
        return f"{row[key].scaled(scale):{spec}}"

    rows = [
        [
            name,
            cell(row, "step", 1e3, ".0f"),
            cell(row, "step_ratio"),
            cell(row, "update", 1e3, ".0f"),
            cell(row, "update_ratio"),
            cell(row, "refresh", 1e3, ".0f"),
            cell(row, "amortized_ratio"),
        ]
        for name, row in summary.items()
    ]
    head = (
        "optimizer",
        "step, ms",
        "÷ AdamW",
        "update, ms",
        "÷ AdamW",
        "refresh, ms",
        "amortized step ÷ AdamW",
    )
    print(harness.table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=lambda text: Size(**json.loads(text)), default=Size())
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="runs a turn; the best one counts")
    parser.add_argument("--refreshes", type=int, default=3, help="rounds that also time a refresh")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine")
    parser.add_argument("--json", type=pathlib.Path, help="where to write every time measured")
    args = parser.parse_args()
    workers = start_workers(args)
    times = measure(workers, args)
    for worker in workers.values():
        worker.close()
    summary = summarize(times, args.clock)
    print(f"{args.size}, rank {args.rank}")
    print(f"medians (quartiles) over {args.rounds} rounds of {args.clock} time")
    print(harness.versions("jax", "optax", "lowrank-optax", "torch", "galore-torch"))
    print_table(summary)
    for name, worker in workers.items():
        if worker.about["compile_s"]:
            seconds = {task: round(s, 1) for task, s in worker.about["compile_s"].items()}
            print(f"compile seconds of {name}: {seconds}")
    if args.json:
        spreads = {
            name: {key: dataclasses.asdict(spread) for key, spread in row.items()}
            for name, row in summary.items()
        }
        args.json.write_text(
            json.dumps(
                {
                    "size": dataclasses.asdict(args.size),
                    "rank": args.rank,
                    "versions": harness.versions("jax", "optax", "torch", "galore-torch"),
                    "about": {name: worker.about for name, worker in workers.items()},
                    "times": times,
                    "summary": spreads,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
