"""The optimizers of ``quality.py``, and one training run of each on a byte-level language model.

All of them project the seven matrices of each block, at one rank, and train embedding and norms
alike. Those that read matrices only get the layers one by one; the others get them stacked.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowrank_optax as lro
from harness import example


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
    seed: int


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


def _is_matrix(path: tuple[Any, ...]) -> bool:
    return any("_proj" in str(getattr(key, "key", key)) for key in path)


def _at_matrices(params: Any, entry: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: entry if _is_matrix(path) else None, params
    )


def _tracker(
    method: str, s: Setting, params: Any, every: Any = None, dtype: Any = jnp.float32
) -> Any:
    def target(path, leaf):
        if not _is_matrix(path):
            return None
        return lro.Target(s.rank, leaf.ndim - 2, leaf.ndim - 1)

    targets = jax.tree_util.tree_map_with_path(target, params)
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


CONTENDERS: dict[str, Contender] = {
    "adamw": Contender(_adamw, 1.5e-3, ranked=False),
    "adafactor": Contender(_adafactor, 2e-2, ranked=False, stacked=False, decays=False),
    "muon": Contender(_muon, 2e-3, ranked=False, stacked=False),
    "contrib.galore": Contender(_contrib_galore, 1e-2, stacked=False),
    "galore svd keep": Contender(_ours("svd", moments="keep", scale=0.25), 1e-2),
    "flora": Contender(_flora, 4e-3),
    "lora": Contender(_adamw, 5e-3, adapters=True),
    "galore": Contender(_ours("subspace"), 5e-3, compact=True),
    "random": Contender(_ours("random"), 5e-3, compact=True),
    "frozen": Contender(_ours("frozen"), 5e-3, compact=True),
    "fira": Contender(_ours("subspace", lambda s: lro.fira_lift()), 5e-3),
    "fira no limit": Contender(_ours("subspace", lambda s: lro.fira_lift(None)), 5e-3),
    "fira random": Contender(_ours("random", lambda s: lro.fira_lift()), 5e-3),
    "sketched": Contender(_sketched("random", 1.0), 7e-3, compact=True),
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
    "galore bf16 bases": Contender(_ours("subspace", dtype=jnp.bfloat16), 5e-3, compact=True),
    "galore int8 moments": Contender(_ours("subspace", bits=jnp.int8), 5e-3, compact=True),
    "galore bf16 moments": Contender(_ours("subspace", bits=jnp.bfloat16), 5e-3, compact=True),
    "sketched all int8": Contender(
        _sketched("random", 1.0, bits=jnp.int8, dtype=jnp.int8), 7e-3, compact=True
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


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, a corpus and a length of training.

    Attributes:
        width: of the model; the feed-forward layer is three times as wide.
        layers: of the model.
        batch: sequences a step.
        length: bytes a sequence.
        steps: updates.
        corpus: a file, or "" for the standard library's source.
        clip: largest global gradient norm, 0 for none.
        decay: weight decay.
    """

    width: int = 128
    layers: int = 4
    batch: int = 8
    length: int = 128
    steps: int = 400
    corpus: str = ""
    clip: float = 0.0
    decay: float = 0.0


@functools.cache
def corpus_of(task: Task) -> Any:
    """The text, cut into training and validation windows."""
    data = example("data")
    text = pathlib.Path(task.corpus).read_bytes() if task.corpus else data.standard_library()
    return data.split(text, task.length)


def _unstacked(params: Any, layers: int) -> Any:
    return params | {
        "layers": [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(layers)]
    }


def _stacked(params: Any) -> Any:
    if not isinstance(params["layers"], list):
        return params
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def _adapters(params: Any, rank: int, seed: int) -> Any:
    """LoRA's pairs for every matrix, the second of each zero, and all that is no matrix."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    rng = np.random.default_rng(seed)
    leaves = []
    for path, leaf in pairs:
        if not _is_matrix(path):
            leaves.append(leaf)
            continue
        *batch, m, n = leaf.shape
        down = rng.standard_normal((*batch, m, rank)) / m**0.5
        leaves.append(
            {"lora_a": jnp.asarray(down, jnp.float32), "lora_b": jnp.zeros((*batch, rank, n))}
        )
    return jax.tree.unflatten(treedef, leaves)


def _merged(frozen: Any, trained: Any) -> Any:
    def one(path, weight, x):
        return weight + x["lora_a"] @ x["lora_b"] if _is_matrix(path) else x

    # At each matrix of the one tree the other has a pair.
    return jax.tree_util.tree_map_with_path(one, frozen, trained)


def count_bytes(tree: Any) -> int:
    """How many bytes the arrays of a pytree hold."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def run(
    name: str, task: Task, rank: int, rate: float, seed: int, validation: int = 128
) -> dict[str, Any]:
    """Trains a model with one contender.

    Args:
        name: a key of `CONTENDERS`.
        task: what to train.
        rank: columns of each basis.
        rate: the peak learning rate: a warm-up of a twentieth of the steps, then a cosine to 10 %.
        seed: of the initial params and of the order of the data.
        validation: windows to validate on.

    Returns:
        The validation loss in nats a byte (None if training diverged), and what it cost.
    """
    contender = CONTENDERS[name]
    decoder = example("decoder")
    config = decoder.DecoderConfig.tiny(
        hidden_size=task.width,
        intermediate_size=3 * task.width,
        num_hidden_layers=task.layers,
        num_attention_heads=max(task.width // 32, 2),
        num_key_value_heads=max(task.width // 64, 1),
    )
    init, apply = decoder.functional(config)
    params = jax.jit(init)(jax.random.key(seed))
    adamw_bytes = count_bytes(jax.eval_shape(optax.adamw(1.0).init, params))
    if not contender.stacked:
        params = _unstacked(params, task.layers)

    def loss_of(params, tokens):
        logits = apply(_stacked(params), tokens[:, :-1])
        return decoder.next_token_loss(logits, tokens[:, 1:])

    frozen = params
    if contender.adapters:
        params = _adapters(params, rank, seed)

    def loss(params, tokens):
        return loss_of(_merged(frozen, params) if contender.adapters else params, tokens)

    shape = example("optimizers").make_schedule(1.0, task.steps, task.steps // 20, "cosine")

    def optimizer(peak):
        # The same draws for all seeds, lest each compile its own step.
        setting = Setting(lambda count: peak * shape(count), rank, contender.every, task.decay, 0)
        tx = contender.make(setting, params)
        if task.clip:
            tx = optax.chain(optax.clip_by_global_norm(task.clip), tx)
        return optax.with_extra_args_support(tx)

    state = jax.jit(optimizer(1.0).init)(params)
    compact = lro.compact_value_and_grad(loss)

    # The rate is an argument, so that all rates share one compiled step.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, peak):
        tx = optimizer(peak)
        if contender.compact:
            value, grads, bases = compact(params, tokens, opt_state=state)
            updates, state = tx.update(grads, state, params, bases=bases)
        else:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    corpus = corpus_of(task)
    result = {"state_bytes": count_bytes(state), "adamw_bytes": adamw_bytes}
    wall, cpu, losses = [], [], []
    start = time.perf_counter()
    if contender.adapters:
        # Donation must not take the weights that stay.
        params = jax.tree.map(jnp.copy, params)
    for number in range(task.steps):
        tokens = corpus.batch(seed, number, task.batch)
        before = time.perf_counter(), time.process_time()
        params, state, value = step(params, state, tokens, rate)
        losses.append(float(value))
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.process_time() - before[1])
        if not np.isfinite(losses[-1]) or losses[-1] > 3 * losses[0]:
            break
    result["seconds"] = time.perf_counter() - start
    result["first_step_s"] = wall[0]
    result["step_ms"] = 1e3 * float(np.median(wall[1:] or wall))
    result["step_cpu_ms"] = 1e3 * float(np.median(cpu[1:] or cpu))
    result["train_loss"] = float(np.mean(losses[-20:])) if np.isfinite(losses[-1]) else None
    result["val_loss"] = None
    if len(losses) == task.steps and np.isfinite(losses[-1]):
        evaluate = jax.jit(loss)
        rows = [
            (float(evaluate(params, tokens)), len(tokens))
            for tokens in corpus.validation_batches(32, validation)
        ]
        mean = sum(value * size for value, size in rows) / sum(size for _, size in rows)
        result["val_loss"] = mean if np.isfinite(mean) else None
    return result
