"""What a run of reinforcement learning shows, and the table at the end."""

import dataclasses
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from running.reporting import Reporter


class RewardReporter(Reporter):
    """A `Reporter` of rewards, whose validations are scores on held-out prompts."""

    validated, label = "score", "held out"

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Reward and divergence."""
        return f"reward {metrics['reward']:.3f}  KL to the start {metrics['reference_kl']:.3f}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes in an iteration, and says so if the guard went back."""
        if metrics["restored"]:
            self.say(
                step,
                f"reward {metrics['reward']:.3f}: collapsed, back to the best state with updates "
                f"times {metrics['step_scale']:g} and KL weight {metrics['kl_weight']:g}",
            )
        super().step(step, metrics)

    def note(self, sentence: str) -> None:
        """Prints what the monitor says."""
        self._console.print(f"{self._name:>8}  {sentence}", highlight=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run amounts to.

    Attributes:
        before: score on held-out prompts after supervised training.
        after: at the end.
        reached: iterations until the rollouts' mean reward was .9, or None.
        restores: how often the guard went back.
        state_bytes: held by the optimizer.
        seconds: of an iteration, the median without those that compiled; None if all did.
    """

    before: float
    after: float
    reached: int | None
    restores: int
    state_bytes: int
    seconds: float | None


def print_results(console: Console, results: Mapping[str, Result], adamw_bytes: int) -> None:
    """Prints the table that the runs were for.

    Args:
        console: where to.
        results: by optimizer.
        adamw_bytes: what AdamW's state for the same parameters holds.
    """
    table = Table()
    table.add_column("optimizer")
    headings = ("before", "after", "iterations to .9", "restores", "state bytes", "of AdamW's")
    for heading in (*headings, "an iteration"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.before:.3f}",
            f"{result.after:.3f}",
            "–" if result.reached is None else str(result.reached),
            str(result.restores),
            f"{result.state_bytes:,}",
            f"{result.state_bytes / adamw_bytes:.1%}",
            "–" if result.seconds is None else f"{result.seconds:.2f} s",
        )
    console.print(table)
