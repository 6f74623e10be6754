"""Moments in 8 or 16 bits, of any optimizer: ``quantized_moments``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowrank_optax._arrays.jaxpr import OnDemand, dependencies
from lowrank_optax._arrays.rounding import from_codes, to_bfloat16, to_codes
from lowrank_optax._arrays.tree import OptState, Params, PyTree, Updates
from lowrank_optax._checks import check_choice
from lowrank_optax._inner.roles import FIRST
from lowrank_optax._inner.sites import sites


class QuantizedState(NamedTuple):
    """State of :func:`quantized_moments`.

    Attributes:
        quantized_count: int32 scalar, updates so far.
        codes: the optimizer's state with its large moments in few bits.
        scales: for each leaf of it the scales of its rows; ``[1]`` in 16 bits, and the scalar 1
            for leaves that are as the optimizer has them.
    """

    quantized_count: jax.Array
    codes: PyTree
    scales: PyTree

    def opened(self) -> OptState:
        """The optimizer's state in float32."""
        return jax.tree.map(_open_leaf, self.codes, self.scales)

    def mapped(self, fn: Callable[[OptState], OptState]) -> "QuantizedState":
        """This state with what ``fn`` makes of its values, opened one leaf at a time."""
        return _in_turns(lambda opened: (None, fn(opened)), self, self.quantized_count, 1)[1]


def _narrow_dtype(code: jax.Array, scale: jax.Array) -> jnp.dtype | None:
    """The dtype of a leaf in few bits; None for one as the optimizer has it, whatever that is."""
    return code.dtype if scale.ndim else None


def _open_leaf(code: jax.Array, scale: jax.Array) -> jax.Array:
    if _narrow_dtype(code, scale) is None:
        return code
    return code.astype(jnp.float32) if code.dtype == jnp.bfloat16 else from_codes(code, scale)


def _close_leaf(leaf: jax.Array, narrow: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    if narrow is None:
        return leaf, jnp.ones([], jnp.float32)
    if narrow == jnp.bfloat16:
        return to_bfloat16(leaf.astype(jnp.float32), key), jnp.ones([1], jnp.float32)
    return to_codes(leaf.astype(jnp.float32), jnp.dtype(narrow), key)


def _rounding_key(count: jax.Array, draw: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), draw)


def _in_turns(
    fn: Callable[[Any], tuple[Any, Any]], state: QuantizedState, count: jax.Array, draw: int
) -> tuple[Any, QuantizedState]:
    """Applies a function to the opened state, one weight's moments after the other's.

    All moments opened at once would take more memory than the codes save.

    Args:
        fn: returns a tree of updates, or None, and another opened state.
        state: the state.
        count: the new state's count.
        draw: which of the rounding's draws at this count.

    Returns:
        The updates and the new state.
    """
    # The function is traced on opened moments and then evaluated in turns. Two outputs that depend
    # on a common moment are in one turn, for it is to be opened once; an optimizer that treats
    # weights apart has a turn for each weight, whose moments are opened, worked on and closed
    # together. One that mixes weights (a global norm of moments) has one turn for all, and is right
    # all the same.
    codes, scales = jax.tree.leaves(state.codes), jax.tree.leaves(state.scales)
    dtypes = [_narrow_dtype(*pair) for pair in zip(codes, scales, strict=True)]
    shapes = jax.eval_shape(QuantizedState.opened, state)
    closed, results = jax.make_jaxpr(fn, return_shape=True)(shapes)
    update_tree, state_tree = (jax.tree.structure(part) for part in results)
    before: list[jax.Array] = []

    def opener(number: int) -> Callable[[], jax.Array]:
        def opened() -> jax.Array:
            code, scale = codes[number], scales[number]
            if before and dtypes[number] is not None:
                # Not before the last turn is over. Without the barrier the compiler, to which the
                # turns are independent, may open all moments at once.
                code, scale, *_ = jax.lax.optimization_barrier((code, scale, *before))
            return _open_leaf(code, scale)

        return opened

    narrow = sum(1 << number for number, dtype in enumerate(dtypes) if dtype is not None)
    on_demand = OnDemand(closed, [opener(number) for number in range(len(codes))])
    found: dict[int, jax.Array] = {}
    key = _rounding_key(count, draw)
    for numbers in _turns([bits & narrow for bits in dependencies(closed)]):
        turn = dict(zip(numbers, on_demand(numbers), strict=True))
        for number in numbers:
            place = number - update_tree.num_leaves
            if place >= 0:
                here = jax.random.fold_in(key, place)
                turn[number], scales[place] = _close_leaf(turn[number], dtypes[place], here)
        found |= turn
        before[:] = turn.values()
    flat = [found[number] for number in sorted(found)]
    updates = jax.tree.unflatten(update_tree, flat[: update_tree.num_leaves])
    codes = jax.tree.unflatten(state_tree, flat[update_tree.num_leaves :])
    return updates, QuantizedState(count, codes, jax.tree.unflatten(state_tree, scales))


def _turns(needed: Sequence[int]) -> list[list[int]]:
    """Groups of outputs that need no moment in common; ``needed`` are bits of those they need."""
    leader: dict[int, int] = {}  # of each moment, another of its group; the last one is itself

    def found(moment: int) -> int:
        while leader.setdefault(moment, moment) != moment:
            leader[moment] = leader[leader[moment]]
            moment = leader[moment]
        return moment

    for bits in needed:
        first, *others = _moments_in(bits) or [-1]
        for moment in others:
            leader[found(moment)] = found(first)
    turns: dict[int, list[int]] = {}
    for number, bits in enumerate(needed):
        # Outputs that need none are one group.
        turns.setdefault(found(_moments_in(bits)[0]) if bits else -1, []).append(number)
    return list(turns.values())


def _moments_in(bits: int) -> list[int]:
    """The numbers of the bits that are set, the lowest first."""
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers


def quantized_moments(
    optimizer: optax.GradientTransformation, dtype: Any = jnp.int8, *, smallest: int = 4096
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the moments of any optimizer in 8 or 16 bits between steps.

    The optimizer itself computes in float32, on one weight's moments after another's where its
    equations allow that, so that they are never all there in float32. Moments are found by the
    names of its state's fields, as :func:`galore_project` finds them, which also carries them over
    to new bases: ``galore_project(quantized_moments(optax.adam(1e-3)))``.

    An 8-bit moment has a logarithmic scale of 32 octaves below a power of two that each row (the
    last axis) has of its own: first moments a sign and 4 levels an octave, second moments 8 levels.
    Rounding is random, from the step count, so that averages are right in the mean; rounded to
    the nearest, a second moment with decay 0.999 would stop changing.

    Args:
        optimizer: any optax optimizer.
        dtype: ``jnp.int8`` for 8 bits, or ``jnp.bfloat16``.
        smallest: leaves with fewer elements stay as they are.

    Returns:
        A gradient transformation with extra arguments; its state is a :class:`QuantizedState`.

    Raises:
        ValueError: if ``dtype`` is neither, or ``smallest`` below 64.

    Example:
        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> tx = lro.quantized_moments(optax.adam(1e-3))
        >>> params = {"kernel": jnp.ones((64, 128))}
        >>> state = tx.init(params)
        >>> optax.tree.get(state.codes, "nu")["kernel"].dtype
        dtype('uint8')
        >>> updates, state = tx.update(params, state, params)

    References:
        Dettmers et al., `8-bit Optimizers via Block-wise Quantization
        <https://arxiv.org/abs/2110.02861>`_, 2021
    """
    choices = [jnp.dtype(d).name for d in (jnp.int8, jnp.bfloat16)]
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    check_choice("quantized_moments: dtype", name, choices)
    dtype = jnp.dtype(dtype)
    if smallest < 64:
        raise ValueError(
            f"quantized_moments: smallest={smallest} must be at least 64: scales of smaller leaves "
            "would outweigh what they save"
        )
    inner = optax.with_extra_args_support(optimizer)

    def narrow_dtype(leaf, role):
        if role is None or not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.size < smallest:
            return None
        if dtype == jnp.bfloat16:
            return dtype
        return jnp.dtype(jnp.int8 if role == FIRST else jnp.uint8)

    def init_fn(params: Params) -> OptState:
        state = inner.init(params)
        leaves, treedef = jax.tree.flatten(state)
        roles = [site.outer_role for site in sites(state, ()) if site.value is not None]
        count, codes, scales = jnp.zeros([], jnp.int32), [], []
        key = _rounding_key(count, 0)
        for number, pair in enumerate(zip(leaves, roles, strict=True)):
            here = jax.random.fold_in(key, number)
            code, scale = _close_leaf(pair[0], narrow_dtype(*pair), here)
            codes.append(code)
            scales.append(scale)
        unflatten = jax.tree.unflatten
        return QuantizedState(count, unflatten(treedef, codes), unflatten(treedef, scales))

    def update_fn(
        updates: Updates, state: OptState, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, OptState]:
        count = jnp.asarray(optax.safe_increment(state.quantized_count))
        update = lambda opened: inner.update(updates, opened, params, **extra_args)  # noqa: E731
        return _in_turns(update, state, count, 0)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
