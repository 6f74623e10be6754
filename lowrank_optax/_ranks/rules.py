"""Ranks by leaf, as ``targets=`` takes them."""

import re
from collections.abc import Mapping, Sequence

from lowrank_optax._plan.plan import LeafPlan, Projection
from lowrank_optax._plan.target import OptionalPattern, Target

Rules = list[tuple[str, Target]]


def rank_rules(leaves: Sequence[LeafPlan | Projection], ranks: Mapping[str, int]) -> Rules:
    """One rule a target that matches its path alone, with its view and side spelled out.

    Args:
        leaves: the plans of some leaves.
        ranks: ranks by path; leaves that are not in it keep theirs.

    Returns:
        Rules. What no rule matches is trained full-rank.
    """
    rules: Rules = []
    for leaf in leaves:
        view = leaf.view
        if view is None:
            continue
        side = "both" if len(leaf.sides) == 2 else "".join(leaf.sides) or None
        rank = ranks.get(leaf.path, leaf.rank or min(view.rows, view.columns))
        target = Target(rank, view.reduction_axes, view.output_axes, side)
        # Optional, so that one table may serve several parts of a partition.
        rules.append((OptionalPattern(f"^{re.escape(leaf.path)}$"), target))
    return rules
