"""Peak memory and communication of a training step, by the real TPU and GPU compilers.

Nothing is run and no accelerator is needed: XLA's compilers report the peak of a jitted step, and
the collectives in it, on any machine. One row a case, written as a line of JSON as soon as it is
known; a case that is in the file already is not compiled again. A contender that does not
compile stays in the table with its reason.

  pip install "jax[tpu]"     # for v5p and v6e
  pip install "jax[cuda12]"  # for h100, in an environment of its own
  python -m benchmarks.memory.memory --only v5p v6e
  python -m benchmarks.memory.memory --only h100
  python -m benchmarks.memory.memory --print

The contenders train the same model, with layers scanned and recomputed, bfloat16 weights and
float32 moments:

- ``adamw``: ``optax.adamw``;
- ``optax.contrib.galore``: as it is, on the scanned model;
- ``galore``: ``lro.galore_adamw`` on full gradients;
- ``matrix-free``: the same behind ``lro.compact_value_and_grad``.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import harness
from lowrank_optax._memory import compiler
from lowrank_optax._memory.devices import DEVICES
from lowrank_optax._memory.models import MODELS
from lowrank_optax._memory.parts import Setting

CONTENDERS = ("adamw", "optax.contrib.galore", "galore", "matrix-free")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model on some devices.

    Attributes:
        model: its name.
        rank: of the block matrices.
        mesh: sizes of the mesh axes.
        batch: sequences a step.
        length: tokens a sequence.
        targets: by device, what to compile for.
    """

    model: str
    rank: int
    mesh: dict[str, int]
    batch: int
    length: int
    targets: dict[str, str]


ONE = {"v5p": "tpu:v5p:2x2x1", "v6e": "tpu:v6e:2x2", "h100": "gpu:h100"}
JOBS = {
    "llama-7b": Job("llama-7b", 128, {}, 1, 2048, ONE),
    "qwen2-7b": Job("qwen2-7b", 128, {}, 1, 2048, ONE),
    "llama-70b": Job(
        "llama-70b",
        256,
        {"fsdp": 8, "tp": 2},
        8,
        2048,
        {"v5p": "tpu:v5p:2x2x4", "v6e": "tpu:v6e:4x4", "h100": "gpu:h100:16"},
    ),
}


def cases(devices: list[str], jobs: list[str], layers: int | None) -> Iterator[dict[str, Any]]:
    """Every case as JSON values that say what is compiled."""
    for name in jobs:
        job = JOBS[name]
        model = MODELS[job.model]
        if layers is not None:
            model = dataclasses.replace(model, layers=layers, name=f"{model.name}, {layers} layers")
        for device in devices:
            for contender in CONTENDERS:
                # What has no rank is compiled once for all.
                rank = 1 if contender == "adamw" else job.rank
                setting = Setting(
                    model, contender, rank, job.mesh, batch=job.batch, length=job.length
                )
                yield {
                    "device": device,
                    "target": job.targets[device],
                    "setting": dataclasses.asdict(setting),
                }


def answer(case: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The compiler's figures for a case, or why there are none."""
    try:
        return dataclasses.asdict(compiler.compile_step(case["target"], case["setting"], timeout))
    except compiler.CompileError as error:
        return {"error": str(error)}


def row(case: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    setting = case["setting"]
    mesh = " x ".join(f"{name} {size}" for name, size in setting["mesh"].items()) or "1 device"
    head = [setting["model"]["name"], case["device"], mesh, setting["optimizer"]]
    if "error" in result:
        return [*head, "—", "—", "—", "—", "—", result["error"][:160]]
    sums = result["collectives"]
    reduced = sums.get("all-reduce", 0) + sums.get("reduce-scatter", 0)
    # Products in turns, by which the TPU compiler replaces gathers and scatters, permute.
    gathered, permuted = sums.get("all-gather", 0), sums.get("collective-permute", 0)
    peak = f"{result['peak'] / 1e9:.1f}"
    fits = result["peak"] <= DEVICES[case["device"]].memory
    note = "" if fits else "more than the device has"
    moved = [f"{size / 1e9:.2f}" for size in (reduced, gathered, permuted)]
    return [*head, peak, *moved, f"{result['seconds']:.0f}", note]


HEAD = (
    "model",
    "device",
    "mesh",
    "optimizer",
    "peak, GB",
    "reduced, GB a step",
    "gathered, GB a step",
    "permuted, GB a step",
    "compile, s",
    "",
)


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results so far, by case; the last of a case counts."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the half-written end of a run that was killed
        results[json.dumps(entry["case"], sort_keys=True)] = entry["result"]
    return results


def main() -> None:
    """Compiles what is missing and prints the table of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ONE, default=list(ONE), help="devices")
    parser.add_argument("--models", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--layers", type=int, help="fewer layers, to try the script out")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a case (3600)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("memory.jsonl"))
    parser.add_argument("--retry", action="store_true", help="compile failed cases again")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    args = parser.parse_args()
    results = read(args.out)
    rows = []
    for case in cases(args.only, args.models, args.layers):
        key = json.dumps(case, sort_keys=True)
        known = key in results and not (args.retry and "error" in results[key])
        if not known and not args.print:
            results[key] = answer(case, args.timeout)
            with args.out.open("a") as file:
                print(json.dumps({"case": case, "result": results[key]}), file=file, flush=True)
            print(*row(case, results[key]), sep="  ", flush=True)
        if key in results:
            rows.append(row(case, results[key]))
    print(harness.versions("jax", "optax", "libtpu", "jax-cuda12-plugin", "lowrank-optax"))
    print(harness.table(HEAD, rows))


if __name__ == "__main__":
    main()
