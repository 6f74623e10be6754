"""The optimizers of ``quality.py``.

All of them project the seven matrices of each block, at one rank, and train embedding and norms
alike. Those that read matrices only get the layers one by one; the others get them stacked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a contender is told.

    Attributes:
        rate: the learning-rate schedule.
        rank: columns of each basis.
        every: steps between refreshes.
        decay: weight decay.
        seed: of its random draws.
    """

    rate: Any
    rank: int
    every: int
    decay: float
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Contender:
    """One optimizer.

    Attributes:
        make: builds it from a `Setting` and the params.
        rate: the middle of its learning-rate grid.
        ranked: whether it has a rank.
        stacked: whether it gets the layers stacked.
        compact: whether its gradients are compact.
        every: steps between refreshes.
        adapters: whether it trains low-rank adapters on frozen matrices.
        decays: whether its weight decay is AdamW's.
    """

    make: Callable[[Setting, Any], optax.GradientTransformation]
    rate: float
    ranked: bool = True
    stacked: bool = True
    compact: bool = False
    every: int = 50
    adapters: bool = False
    decays: bool = True


def is_matrix(path: tuple[Any, ...]) -> bool:
    return any("_proj" in str(getattr(key, "key", key)) for key in path)


def _at_matrices(params: Any, entry: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: entry if is_matrix(path) else None, params
    )


def _targets(s: Setting, params: Any) -> Any:
    def target(path, leaf):
        if not is_matrix(path):
            return None
        return lro.Target(s.rank, leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(target, params)


def _tracker(
    method: str, s: Setting, params: Any, every: Any = None, dtype: Any = jnp.float32
) -> Any:
    targets = _targets(s, params)
    every = every or s.every
    return lro.refresh_basis(every=every, method=method, targets=targets, seed=s.seed, dtype=dtype)


def _ours(
    method: str,
    lift: Callable[[Setting], Any] = lambda s: None,
    every: Any = None,
    dtype: Any = jnp.float32,
    bits: Any = None,
    **options: Any,
) -> Any:
    """Ours with AdamW inside; ``dtype`` of the bases, ``bits`` of the moments."""

    def make(s: Setting, params: Any) -> optax.GradientTransformation:
        inner = optax.adamw(s.rate, weight_decay=s.decay) if s.decay else optax.adam(s.rate)
        if bits is not None:
            inner = lro.quantized_moments(inner, bits)
        tracker = _tracker(method, s, params, every, dtype)
        return lro.galore_project(inner, tracker, lift=lift(s), **options)

    return make


def _ldadam(s: Setting, params: Any) -> optax.GradientTransformation:
    return lro.error_feedback(_ours("subspace", every=1)(s, params))


def _lion(s: Setting, params: Any) -> optax.GradientTransformation:
    """Lion with a low-rank momentum at matrices; embedding and norms as in Lion."""
    momentum = lro.galore_project(
        lro.lion_momentum(), _tracker("subspace", s, params), lift=lro.sign_lift()
    )
    parts = [momentum, optax.scale_by_sign()]
    if s.decay:
        parts.append(optax.add_decayed_weights(s.decay))
    return optax.chain(*parts, optax.scale_by_learning_rate(s.rate))


def _sketched(method: str, extra: float, amplitude: float = 1.0, **options: Any) -> Any:
    return _ours(
        method, lambda s: lro.sketched_residual_lift(extra, amplitude, seed=s.seed), **options
    )


def _lowrank_adamw(s: Setting, params: Any) -> optax.GradientTransformation:
    """The library's own alias, with all of its defaults."""
    return lro.lowrank_adamw(s.rate, weight_decay=s.decay, targets=_targets(s, params), seed=s.seed)


def _contrib_galore(s: Setting, params: Any) -> optax.GradientTransformation:
    return optax.contrib.galore(
        s.rate,
        rank=s.rank,
        update_proj_gap=s.every,
        scale=0.25,
        weight_decay=s.decay,
        weight_dimension_numbers=_at_matrices(params, optax.contrib.GaLoreDimensionNumbers()),
    )


def _muon(s: Setting, params: Any) -> optax.GradientTransformation:
    numbers = _at_matrices(params, optax.contrib.MuonDimensionNumbers())
    return optax.contrib.muon(
        s.rate,
        weight_decay=s.decay,
        adam_weight_decay=s.decay,
        muon_weight_dimension_numbers=numbers,
        consistent_rms=0.2,
    )


def _flora(s: Setting, params: Any) -> optax.GradientTransformation:
    """Flora's rule: momentum under a random projection, Adafactor's second moment outside."""
    parts = [
        lro.galore_project(optax.ema(0.9), _tracker("random", s, params)),
        optax.scale_by_factored_rms(min_dim_size_to_factor=32),
        optax.clip_by_block_rms(1.0),
    ]
    if s.decay:
        parts.append(optax.add_decayed_weights(s.decay))
    return optax.chain(*parts, optax.scale_by_learning_rate(s.rate))


def _adafactor(s: Setting, params: Any) -> optax.GradientTransformation:
    del params
    assert not s.decay, "Adafactor's decay knows no learning rate"
    return optax.adafactor(s.rate, min_dim_size_to_factor=32)


def _adamw(s: Setting, params: Any) -> optax.GradientTransformation:
    del params
    return optax.adamw(s.rate, weight_decay=s.decay)


def _split_adamw(factor: float) -> Any:
    """AdamW at another rate for embedding and norms, as a scale on the matrices alone has it."""

    def make(s: Setting, params: Any) -> optax.GradientTransformation:
        labels = jax.tree_util.tree_map_with_path(
            lambda path, _: "matrix" if is_matrix(path) else "rest", params
        )
        rates = {"matrix": s.rate, "rest": lambda count: factor * s.rate(count)}
        return optax.partition(
            {k: optax.adamw(rate, weight_decay=s.decay) for k, rate in rates.items()}, labels
        )

    return make


def _logra(s: Setting, params: Any) -> optax.GradientTransformation:
    inner = optax.adamw(s.rate, weight_decay=s.decay) if s.decay else optax.adam(s.rate)
    return lro.logra_sketch(inner, lro.learn_basis(targets=_targets(s, params), seed=s.seed))


CONTENDERS: dict[str, Contender] = {
    "adamw": Contender(_adamw, 1.5e-3, ranked=False),
    "adamw rest×4": Contender(_split_adamw(4.0), 1.5e-3, ranked=False),
    "adamw rest×16": Contender(_split_adamw(16.0), 1.5e-3, ranked=False),
    "adafactor": Contender(_adafactor, 2e-2, ranked=False, stacked=False, decays=False),
    "muon": Contender(_muon, 2e-3, ranked=False, stacked=False),
    "contrib.galore": Contender(_contrib_galore, 1e-2, stacked=False),
    "galore svd keep": Contender(_ours("svd", moments="keep", scale=0.25), 1e-2),
    "flora": Contender(_flora, 4e-3),
    "lora": Contender(_adamw, 5e-3, adapters=True),
    "galore": Contender(_ours("subspace"), 5e-3, compact=True),
    "galore scale=0.25": Contender(_ours("subspace", scale=0.25), 1e-2, compact=True),
    "logra": Contender(_logra, 5e-3),
    "random": Contender(_ours("random"), 5e-3, compact=True),
    "frozen": Contender(_ours("frozen"), 5e-3, compact=True),
    "fira": Contender(_ours("subspace", lambda s: lro.fira_lift()), 5e-3),
    "fira no limit": Contender(_ours("subspace", lambda s: lro.fira_lift(None)), 5e-3),
    "fira random": Contender(_ours("random", lambda s: lro.fira_lift()), 5e-3),
    "lowrank_adamw": Contender(_lowrank_adamw, 1e-2, compact=True),
    "sketched": Contender(_sketched("random", 1.0), 7e-3, compact=True),
    "sketched scale=0.25": Contender(_sketched("random", 1.0, scale=0.25), 1e-2, compact=True),
    "sketched k=r/4": Contender(_sketched("random", 0.25), 7e-3, compact=True),
    "sketched k=r/2": Contender(_sketched("random", 0.5), 7e-3, compact=True),
    "sketched k=2r": Contender(_sketched("random", 2.0), 7e-3, compact=True),
    "sketched a=0.5": Contender(_sketched("random", 1.0, 0.5), 7e-3, compact=True),
    "sketched a=2": Contender(_sketched("random", 1.0, 2.0), 7e-3, compact=True),
    "sketched subspace": Contender(_sketched("subspace", 1.0), 7e-3, compact=True),
    "sketched every=10": Contender(_sketched("random", 1.0), 7e-3, compact=True, every=10),
    "sketched every=200": Contender(_sketched("random", 1.0), 7e-3, compact=True, every=200),
    "sketched frozen": Contender(_sketched("frozen", 1.0), 7e-3, compact=True),
    "sketched keep": Contender(_sketched("random", 1.0, moments="keep"), 7e-3, compact=True),
    "sketched reset": Contender(_sketched("random", 1.0, moments="reset"), 7e-3, compact=True),
    "ldadam": Contender(_ldadam, 5e-3),
    "lion": Contender(_lion, 1e-3, compact=True),
    "galore adaptive": Contender(
        _ours("subspace", every=lro.adaptive_every(25, 200)), 5e-3, compact=True
    ),
    "galore int8 bases": Contender(_ours("subspace", dtype=jnp.int8), 5e-3, compact=True),
    "galore int4 bases": Contender(_ours("subspace", dtype=jnp.int4), 5e-3, compact=True),
    "galore bf16 bases": Contender(_ours("subspace", dtype=jnp.bfloat16), 5e-3, compact=True),
    "galore int8 moments": Contender(_ours("subspace", bits=jnp.int8), 5e-3, compact=True),
    "galore bf16 moments": Contender(_ours("subspace", bits=jnp.bfloat16), 5e-3, compact=True),
    "sketched all int8": Contender(
        _sketched("random", 1.0, bits=jnp.int8, dtype=jnp.int8), 7e-3, compact=True
    ),
    "sketched int4 bases": Contender(
        _sketched("random", 1.0, bits=jnp.int8, dtype=jnp.int4), 7e-3, compact=True
    ),
    "apollo": Contender(_ours("random", lambda s: lro.apollo_lift(), moments="keep"), 2e-3),
    "apollo-mini": Contender(
        lambda s, params: _ours("random", lambda s: lro.apollo_lift("tensor"), moments="keep")(
            dataclasses.replace(s, rank=1), params
        ),
        2e-3,
        ranked=False,
    ),
}
