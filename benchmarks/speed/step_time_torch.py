"""A worker of ``step_time.py``: the same decoder and optimizers in eager PyTorch."""

import argparse
import json
import math

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks import harness, plain_decoder

NEVER = 10**9
RATE = 1e-3


class Decoder:
    """:func:`plain_decoder.loss` on torch parameters, whose matrices are ``(in, out)`` here too."""

    def __init__(self, size: plain_decoder.Size):
        def parameter(tree):
            if isinstance(tree, dict):
                return {name: parameter(value) for name, value in tree.items()}
            if isinstance(tree, list):
                return [parameter(value) for value in tree]
            return torch.nn.Parameter(torch.tensor(tree))

        self.params = parameter(plain_decoder.init(size))
        blocks = self.params["blocks"]
        self.matrices = [block[name] for block in blocks for name in plain_decoder.MATRICES]
        self.others = [block[name] for block in blocks for name in ("norm1", "norm2")]
        self.others += [self.params[name] for name in ("embedding", "norm", "lm_head")]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross entropy."""
        norm = lambda x, scale: F.rms_norm(x, x.shape[-1:], scale, 1e-6)  # noqa: E731
        x = self.params["embedding"][tokens[:, :-1]]
        batch, length, width = x.shape
        heads = (batch, length, width // plain_decoder.HEAD_DIM, plain_decoder.HEAD_DIM)
        for block in self.params["blocks"]:
            y = norm(x, block["norm1"])
            q, k, v = ((y @ block[name]).view(heads).transpose(1, 2) for name in "qkv")
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(x.shape) @ block["o"]
            y = norm(x, block["norm2"])
            x = x + (F.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
        logits = norm(x, self.params["norm"]) @ self.params["lm_head"]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer(name: str, model: Decoder, rank: int, every: int) -> torch.optim.Optimizer:
    """A contender; ``every=1`` makes each step a refresh, ``NEVER`` only the first."""
    if name == "torch.optim.AdamW":
        return torch.optim.AdamW(model.matrices + model.others, lr=RATE, weight_decay=0.0)
    if name == "galore_torch":
        from galore_torch import GaLoreAdamW

        projection = {"rank": rank, "update_proj_gap": every, "scale": 0.25, "proj_type": "std"}
        groups = [{"params": model.matrices} | projection, {"params": model.others}]
        return GaLoreAdamW(groups, lr=RATE, no_deprecation_warning=True)
    raise ValueError(f"no contender is called {name!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--size", type=json.loads, default={})
    parser.add_argument("--rank", type=int, default=128)
    args = parser.parse_args()
    size = plain_decoder.Size(**args.size)
    model = Decoder(size)
    tokens = torch.tensor(plain_decoder.batches(size, 4)).long()
    turn = 0

    def task(every: int, full_step: bool):
        tx = optimizer(args.contender, model, args.rank, every)

        def run() -> None:
            nonlocal turn
            turn += 1
            if full_step:
                tx.zero_grad()
                model.loss(tokens[turn % len(tokens)]).backward()
            tx.step()

        return run

    first = model.loss(tokens[0])
    first.backward()
    assert math.isfinite(first.item())
    # The update alone comes first: it needs the gradients that are there.
    tasks = {"update": task(NEVER, False), "step": task(NEVER, True)}
    if args.contender != "torch.optim.AdamW":
        tasks["refresh"] = task(1, False)
    for run in tasks.values():
        run()
    harness.serve(tasks, {"compile_s": {}})


if __name__ == "__main__":
    main()
