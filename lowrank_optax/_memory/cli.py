"""The console script ``lowrank-optax``."""

import argparse
import sys
from collections.abc import Sequence

from lowrank_optax._memory.decoder import OPTIMIZERS
from lowrank_optax._memory.devices import DEVICES
from lowrank_optax._memory.models import MODELS
from lowrank_optax._memory.plan import memory_plan

_EXAMPLES = """examples:
  lowrank-optax plan llama-7b
  lowrank-optax plan qwen2-7b --optimizer galore --rank 0.25 --device h100
  lowrank-optax plan path/to/config.json --mesh fsdp=8,tp=2 --batch 16 --device v5p
  lowrank-optax plan llama-7b --compile tpu:v5p:2x2x1
"""


def _rank(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowrank-optax", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="the memory of a training step, per device, and whether low rank is worth it",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = plan.add_argument
    add("model", help=f"a config.json or one of {', '.join(MODELS)}")
    add("--optimizer", default="matrix-free", help=f"{', '.join(OPTIMIZERS)} (%(default)s)")
    add("--rank", type=_rank, default=128, help="integer, or share of the smaller side (128)")
    add("--mesh", help="sizes of data, fsdp and tp, such as fsdp=8,tp=2 (one device)")
    add("--batch", type=int, default=1, help="sequences a step, over all devices (1)")
    add("--length", type=int, default=2048, help="tokens a sequence (2048)")
    add("--param-dtype", default="bfloat16", help="of weights and activations (bfloat16)")
    add(
        "--moment-dtype", default="float32", help="of moments; param: the optimizer's own (float32)"
    )
    add("--no-remat", action="store_true", help="layers are not recomputed in the backward pass")
    add("--device", help=f"a device to fit: {', '.join(DEVICES)}")
    add(
        "--compile",
        metavar="TARGET",
        help="ask the real compiler: tpu:v5p:2x2x1, tpu:v6e:2x4, gpu:h100, gpu:h100:8",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: the arguments; None takes the process's own.

    Returns:
        The exit code, 2 for what the user has to put right.
    """
    args = _parser().parse_args(argv)
    try:
        plan = memory_plan(
            args.model,
            args.optimizer,
            rank=args.rank,
            mesh=args.mesh,
            param_dtype=args.param_dtype,
            moment_dtype=args.moment_dtype,
            batch=args.batch,
            length=args.length,
            remat=not args.no_remat,
            device=args.device,
            compiler=args.compile,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"lowrank-optax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
