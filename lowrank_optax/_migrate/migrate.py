"""Carrying an optimizer's state over to another optimizer: ``migrate``."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import Leaf, rebox, unbox
from lowrank_optax._arrays.mesh import place_like
from lowrank_optax._arrays.tree import OptState, Params, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._migrate import bases, reencode
from lowrank_optax._migrate.source import COUNTS, Biases, OldState
from lowrank_optax._migrate.space import Place, places, shape_in
from lowrank_optax._plan.plan import Projection


def _describe_array(x: Leaf) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)


def _mismatch(given: Sequence[Place], expected: Sequence[Place]) -> str:
    """How a state differs from what is expected of it; empty if it does not."""
    got = {place.site.name: place.value for place in given}
    wanted = {place.site.name: place.value for place in expected}
    for name in wanted:
        if name not in got:
            return f"it has nothing at {name!r}, expected {_describe_array(wanted[name])}"
        if _describe_array(got[name]) != _describe_array(wanted[name]):
            return (
                f"at {name!r} it has {_describe_array(got[name])}, "
                f"expected {_describe_array(wanted[name])}"
            )
    extra = next((name for name in got if name not in wanted), None)
    return "" if extra is None else f"it has {_describe_array(got[extra])} at {extra!r}, unexpected"


def _check(opt_state: OptState, old_tx: Any, new_tx: Any, params: Params) -> None:
    for name, tx in (("old_tx", old_tx), ("new_tx", new_tx)):
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(
                f"migrate: {name} must be a gradient transformation such as optax.adamw(1e-3), "
                f"got {tx!r}; the order is migrate(opt_state, old_tx, new_tx, params)"
            )

    def difference(tx: optax.GradientTransformation) -> str:
        with warnings.catch_warnings():  # what init says was said when the state was made
            warnings.simplefilter("ignore")
            expected = jax.eval_shape(tx.init, params)
        return _mismatch(places(opt_state, params, tx), places(expected, params, tx))

    problem = difference(old_tx)
    if problem:
        hint = ""
        if not difference(new_tx):
            hint = " (it fits new_tx: were the two swapped, or is the state migrated already?)"
        raise ValueError(
            f"migrate: opt_state is not a state of old_tx for these params: {problem}{hint}. Pass "
            "the transformation that made opt_state as old_tx, and the params that it updates"
        )


def _carry_moments(
    old: OldState, new: Sequence[Place], biases: Biases, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[int, Array]]:
    """The number of each array of the new state that is a moment, and its value."""
    turns: dict[Any, int] = {}
    calls: dict[Any, dict[int, Place]] = {}
    for number, place in enumerate(new):
        if not place.site.role or place.path not in shapes:
            continue
        turn = turns[place.kind] = turns.get(place.kind, -1) + 1
        source = old.find(place, turn)
        whole = shapes[place.path]
        if (
            source is not None
            and source.value.shape == shape_in(source.space, whole)
            and place.value.shape == shape_in(place.space, whole)
        ):
            calls.setdefault((id(source.site.owner), id(place.site.owner), place.path), {})[
                number
            ] = source
    for numbers in calls.values():
        sources = list(numbers.values())
        source, place = sources[0], new[next(iter(numbers))]
        if source.space.is_nested(place.space) and source.space.rank == place.space.rank:
            yield from ((number, s.value) for number, s in numbers.items())
            continue
        # The first moment of the same state tells the mean, whether or not it is wanted.
        means = [
            s
            for s in old.places
            if s.site.owner is source.site.owner
            and s.path == source.path
            and s.site.role == "first"
        ]
        known = {s.site.field: s for s in [*means, *sources]}
        roles = tuple((s.site.field, s.site.role or "") for s in known.values())
        first = next((field for field, role in roles if role == "first"), None)
        paired = next((field for field, role in roles if role == "second"), None)
        bias = jnp.ones([])
        if first and paired:
            bias = biases.of(source.site.owner, source.path, first, paired, old.steps)
        moved = reencode.reencode(
            source.space.form,
            place.space.form,
            source.space.is_nested(place.space),
            roles,
            source.space.bases,
            place.space.bases,
            {s.site.field: s.value for s in known.values()},
            bias,
        )
        yield from ((number, moved[s.site.field]) for number, s in numbers.items())


def _projections(state: OptState) -> list[Projection]:
    return [p for t in find_states(state, TrackerState) for p in t.plan.projections]


def _initial_hyperparams(old_tx: optax.GradientTransformation, params: Params) -> dict[str, Any]:
    """What the old optimizer's injected hyperparameters were before anyone changed them."""

    @jax.jit  # which computes nothing else of the state
    def initial(params):
        found = places(old_tx.init(params), params, old_tx)
        return {p.site.name: p.value for p in found if p.site.field == "hyperparams"}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return initial(params)


def _carry_rest(
    old: OldState, new: Sequence[Place], same_targets: bool, hyperparams: dict[str, Any]
) -> Iterator[tuple[int, Array]]:
    """The number of each other array that has a counterpart, and its value."""
    turns: dict[Any, int] = {}
    for number, place in enumerate(new):
        if place.value is None or place.site.role or place.in_tracker:
            continue
        turn = turns[place.kind] = turns.get(place.kind, -1) + 1
        source = old.find(place, turn)
        if source is None:
            if place.site.field in COUNTS and place.value.shape == () and old.steps is not None:
                yield number, old.steps
        elif source.value.shape == place.value.shape:
            value = source.value
            if place.site.field == "hyperparams" and source.site.name in hyperparams:
                # What was set by hand stays; what the constructor was given anew is new.
                unchanged = hyperparams[source.site.name] == place.value
                value = jnp.where(unchanged, value, place.value)
            # A vector with an entry a target means something for the same targets only.
            if same_targets or place.path or value.ndim == 0:
                yield number, value


def _warn_about(fresh: Sequence[Place]) -> None:
    if not fresh:
        return
    names = list(dict.fromkeys(place.site.title for place in fresh))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    warnings.warn(
        f"lowrank_optax: migrate: {shown}: the old state has no counterpart that fits, so it "
        "starts as new_tx.init makes it",
        stacklevel=3,
    )


def migrate(
    opt_state: OptState,
    old_tx: optax.GradientTransformation,
    new_tx: optax.GradientTransformation,
    params: Params,
) -> OptState:
    r"""Carries an optimizer's state over to another optimizer for the same params.

    From a whole weight to a basis P, from a basis to the whole weight, to another rank, another
    side, another set of targets, in any wrappers. With :math:`Q = P'^T P`, where a weight that
    is not projected has :math:`P = I`,

    .. math:: m' = Q m, \qquad
              v' = (Q \circ Q)\,\sigma^2 + \tau\,(1 - (Q \circ Q) 1) + c\,(Q m)^2, \qquad
              \sigma^2 = v - c\,m^2

    where :math:`c` undoes the moments' bias corrections and :math:`\tau`, the smallest second
    moment of the same column, stands for directions that the old basis had not seen. (Without
    the mean's own term, :math:`v' = (P \circ P)^T v` would take a mean of many small entries
    for a small one, and the next step would be far too large.)

    Bases: a weight that keeps its view and side keeps its basis. To a larger rank it is
    continued by random orthonormal directions, with :math:`m' = 0, v' = \tau` there; to a
    smaller one its leading columns stay. A weight that had no basis on that side gets the
    leading subspace of its first moment, or the seeded random start where there is none or it
    is 0, and is refreshed at the next step, which carries the moments over once more.
    A kept basis keeps the time of its next refresh.

    Everything else is carried where the new state has an array of the same name, in a state
    of the same type, of the same shape: counts (so that schedules go on), hyperparameters of
    ``optax.inject_hyperparams`` (unless new_tx was given another value than old_tx), the
    counters of ``optax.MultiSteps``. Moments are recognised by field names, as in
    :func:`galore_project`. Accumulated gradients are moved like first moments, so it may run
    between any two steps.

    Args:
        opt_state: a state of ``old_tx``.
        old_tx: the optimizer that made it.
        new_tx: the optimizer to go on with.
        params: the params that both update.

    Returns:
        A state with the structure, shapes and dtypes of ``new_tx.init(params)``. It shares
        arrays with ``opt_state`` where nothing changed. The call may be jitted.

    Raises:
        TypeError: if ``old_tx`` or ``new_tx`` is no gradient transformation.
        ValueError: if ``opt_state`` is no state of ``old_tx`` for ``params``.

    Warns:
        UserWarning: if a moment has no source, or a field that is not recognised does not fit,
            with its name; it then is as ``new_tx.init`` makes it.

    Example:
        Progressive enabling: the feed-forward layers in a subspace first, then attention too.

        >>> import jax.numpy as jnp, optax, lowrank_optax as lro
        >>> params = {"mlp": {"kernel": jnp.ones((16, 32))}, "attn": {"kernel": jnp.ones((16, 16))}}
        >>> stages = [[("mlp", 4)], [("mlp", 4), ("attn", 8)]]
        >>> first, second = (lro.galore_adamw(1e-2, targets=targets) for targets in stages)
        >>> state = first.init(params)
        >>> updates, state = first.update(params, state, params)
        >>> state = lro.migrate(state, first, second, params)
        >>> state.inner_state[0].mu["attn"]["kernel"].shape
        (8, 16)

    References:
        Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient
        Statistics <https://arxiv.org/abs/2410.16103>`_, 2024, for the second moment's mean
    """
    paths, leaves, _ = tree.flatten_with_paths(params)
    _check(opt_state, old_tx, new_tx, params)
    # A checkpoint may have been read as NumPy arrays.
    opt_state = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), opt_state)
    arrays = {
        path: unbox(leaf) for path, leaf in zip(paths, leaves, strict=True) if leaf is not None
    }
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    old = OldState(places(opt_state, params, old_tx))
    start = bases.carry_bases(
        new_tx.init(params), find_states(opt_state, TrackerState), old.places, old.steps, arrays
    )
    new = places(start, params, new_tx)
    biases = Biases(old, old_tx, params)
    carried = dict(_carry_moments(old, new, biases, shapes))
    hyperparams: dict[str, Any] = {}
    if any(place.site.field == "hyperparams" for place in old.places):
        hyperparams = _initial_hyperparams(old_tx, params)
    same_targets = _projections(opt_state) == _projections(start)
    carried |= dict(_carry_rest(old, new, same_targets, hyperparams))
    _warn_about(
        [
            place
            for number, place in enumerate(new)
            if number not in carried
            and place.value is not None
            and place.path
            and not place.in_tracker
            and place.site.field != "acc_grads"
            and (
                place.site.role or (type(place.site.owner).__name__, place.site.field) in old.fields
            )
        ]
    )
    boxes, treedef = tree.flatten(start)
    for number, value in carried.items():
        like = new[number].value
        value = value if value.dtype == like.dtype else value.astype(like.dtype)
        boxes[number] = rebox(boxes[number], place_like(value, like))
    return tree.unflatten(treedef, boxes)
