"""Weights of few bits that still learn from small updates.

A bfloat16 weight has eight significant bits: an update below 1/512 of it is rounded away, and most
updates of fine-tuning are smaller. Two ways out, both wrappers around any optimizer:

- `float32_master` keeps the weights in float32, too, in the optimizer's state: 4 more bytes each;
- `stochastic_rounding` rounds up or down at random so that the mean is right: no memory.

With both the optimizer inside sees float32 weights, and its moments are float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


class MasterState(NamedTuple):
    """State of `float32_master`.

    Attributes:
        master: the weights in float32.
        inner_state: of the wrapped optimizer.
    """

    master: Any
    inner_state: optax.OptState


def float32_master(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Applies the updates to float32 copies, which the weights are the rounding of.

    Args:
        inner: the optimizer.

    Returns:
        A gradient transformation whose updates are float32, for ``optax.apply_updates``.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> MasterState:
        # A copy even of float32 leaves: the training step donates parameters and state.
        master = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return MasterState(master, inner.init(master))

    def update(
        updates: Any, state: MasterState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("float32_master needs params: tx.update(grads, state, params)")
        updates, inner_state = inner.update(updates, state.inner_state, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        steps = jax.tree.map(lambda new, p: new - p.astype(jnp.float32), master, params)
        return steps, MasterState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        rounded: how many updates were rounded.
        inner_state: of the wrapped optimizer.
    """

    rounded: jax.Array
    inner_state: optax.OptState


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two neighbours in bfloat16; the mean is ``x``.

    Args:
        x: float32.
        key: a PRNG key.

    Returns:
        bfloat16. What is not finite stays as it is.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # The upper half of a float32 is its bfloat16: carry into it with the right probability.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = ((bits + noise) >> 16).astype(jnp.uint16)
    moved = jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), moved, x.astype(jnp.bfloat16))


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds updated bfloat16 weights at random; leaves of other types are left alone.

    Args:
        inner: the optimizer.
        seed: of the rounding. The noise is a function of the seed, the step and the leaf.

    Returns:
        A gradient transformation whose updates are float32, for ``optax.apply_updates``.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> StochasticRoundingState:
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(_wide(params)))

    def update(
        updates: Any, state: StochasticRoundingState, params: Any = None, **extra: Any
    ) -> tuple[Any, StochasticRoundingState]:
        if params is None:
            raise ValueError("stochastic_rounding needs params: tx.update(grads, state, params)")
        wide = _wide(params)
        updates, inner_state = inner.update(updates, state.inner_state, wide, **extra)
        key = jax.random.fold_in(jax.random.key(seed), state.rounded)
        old, treedef = jax.tree.flatten(params)
        new = jax.tree.leaves(optax.apply_updates(wide, updates))
        steps = [
            _step(p, x, jax.random.fold_in(key, leaf))
            for leaf, (p, x) in enumerate(zip(old, new, strict=True))
        ]
        rounded = optax.safe_increment(state.rounded)
        return treedef.unflatten(steps), StochasticRoundingState(rounded, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _step(old: jax.Array, new: jax.Array, key: jax.Array) -> jax.Array:
    """What leads from the old weight to the new one, rounded if the weight is bfloat16."""
    if old.dtype == jnp.bfloat16:
        new = round_stochastically(new, key).astype(jnp.float32)
    return new - old.astype(jnp.float32)


def apply_precision(
    name: str, tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """The wrapper that ``--precision`` names.

    Args:
        name: a key of `PRECISIONS`.
        tx: the optimizer.
        seed: of stochastic rounding.

    Returns:
        The optimizer for weights of ``PRECISIONS[name]``.
    """
    if name == "master":
        return float32_master(tx)
    if name == "stochastic":
        return stochastic_rounding(tx, seed)
    return optax.with_extra_args_support(tx)


def seen_by_optimizer(name: str, weight: jax.Array) -> jax.ShapeDtypeStruct:
    """A weight's shape, in the type that the optimizer inside `apply_precision` sees."""
    dtype = weight.dtype if name == "bfloat16" else jnp.float32
    return jax.ShapeDtypeStruct(weight.shape, dtype)


PRECISIONS = {
    "stochastic": "bfloat16",
    "master": "bfloat16",
    "bfloat16": "bfloat16",
    "float32": "float32",
}
"""What ``--precision`` offers, with the type of weights and layers."""
