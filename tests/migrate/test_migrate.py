"""Carrying a state over: structure, identity, moments against hand-made ones, wrappers, errors."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowrank_optax as lro
from lowrank_optax._migrate import reencode
from lowrank_optax._migrate.bases import resize
from lowrank_optax._plan.plan import Projection
from lowrank_optax._plan.view import Bases, make_view
from tests.helpers.assertions import as_matrix, assert_orthonormal, avals, basis_matrices, unchecked
from tests.helpers.data import layout, normal, random_like
from tests.helpers.loops import relaxed

PARAMS = {
    "mlp": {"kernel": normal(0, (8, 12)), "bias": jnp.ones(12)},
    "attn": {"q": {"kernel": normal(1, (3, 10, 8))}},
    "embed": {"embedding": normal(2, (9, 6))},
}
STACK = lro.Target(None, 1, 2)


def targets(mlp=None, attn=None, embed=None, side=None):
    """One table with three ranks, None for full-rank."""
    stack = attn and dataclasses.replace(STACK, rank=attn, side=side)
    mlp = mlp and lro.Target(mlp, side=side)
    return {
        "mlp": {"kernel": mlp, "bias": None},
        "attn": {"q": {"kernel": stack}},
        "embed": {"embedding": embed and lro.Target(embed)},
    }


@functools.cache
def adamw(rate=1e-2):
    return relaxed(optax.adamw(rate, weight_decay=0.1))


@functools.cache
def low(inner=None, mlp=None, attn=None, embed=None, side=None, **options):
    tracker = lro.refresh_basis(every=4, targets=targets(mlp, attn, embed, side), **options)
    return lro.galore_project(adamw() if inner is None else inner, tracker)


@functools.cache
def compiled(tx):
    return jax.jit(tx.update)


@functools.cache
def advanced(tx, steps):
    return _advance(tx, steps, PARAMS, tx.init(PARAMS))


def advance(tx, steps=5, params=None, state=None):
    """A state after some steps of gradients that share a direction."""
    if params is None and state is None:
        return advanced(tx, steps)
    params = PARAMS if params is None else params
    return _advance(tx, steps, params, tx.init(params) if state is None else state)


def _advance(tx, steps, params, state):
    for step in range(steps):
        noise = random_like(params, step)
        gradients = jax.tree.map(lambda p, n: (p + 0.3 * n).astype(p.dtype), params, noise)
        _, state = compiled(tx)(gradients, state, params)
    return state


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def migrated(state, old, new, params=PARAMS):
    """The migrated state, after checking what must hold of any."""
    result = lro.migrate(state, old, new, params)
    assert avals(result) == avals(new.init(params))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(result) if x.dtype == jnp.float32)
    return result


def adam_state(state):
    """The only state that has mu."""
    found = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu") and hasattr(x, "nu"))
    return next(x for x in found if hasattr(x, "mu"))


def tracker_state(state):
    return next(
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, lro.TrackerState))
        if isinstance(x, lro.TrackerState)
    )


def accumulating(tx, steps):
    return relaxed(optax.MultiSteps(tx, steps).gradient_transformation())


CLIP = optax.clip_by_global_norm(1.0)
IS_MATRIX = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
LABELS = functools.partial(jax.tree.map, lambda x: "ours" if x.ndim > 1 else "rest")
AROUND = {
    "bare": lambda tx: tx,
    "chain": lambda tx: optax.chain(CLIP, tx),
    "masked": lambda tx: optax.chain(optax.masked(tx, IS_MATRIX)),
    "partition": lambda tx: optax.partition({"ours": tx, "rest": optax.sgd(0.1)}, LABELS),
    "multi_steps": lambda tx: accumulating(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


def masked_targets(**ranks):
    """Rules, which fit a tree that a mask has thinned out."""
    entries = {"mlp": lro.Target(ranks["mlp"]), "attn": lro.Target(ranks["attn"], 1, 2)}
    return list(entries.items())


@functools.cache
def low_by_rules(**ranks):
    return lro.galore_project(adamw(), lro.refresh_basis(every=4, targets=masked_targets(**ranks)))


@pytest.mark.parametrize("wrapper", AROUND)
def test_in_any_wrapper(wrapper):
    """Whole to low rank, to a larger rank, and back: structure, counts and moments."""
    wrap = AROUND[wrapper]
    whole, small, large = (
        wrap(adamw()),
        wrap(low_by_rules(mlp=3, attn=2)),
        wrap(low_by_rules(mlp=5, attn=4)),
    )
    start = advance(whole, 6)
    assert_same(lro.migrate(start, whole, whole, PARAMS), start)
    first = migrated(start, whole, small)
    second = migrated(first, small, large)
    back = migrated(second, large, whole)
    count = adam_state(start).count
    assert count == (3 if wrapper == "multi_steps" else 6)
    for state in (first, second, back):
        assert adam_state(state).count == count
    assert tracker_state(first).tracker_count == count
    np.testing.assert_array_equal(adam_state(second).mu["mlp"]["kernel"][3:], 0)
    np.testing.assert_array_equal(
        adam_state(second).mu["mlp"]["kernel"][:3], adam_state(first).mu["mlp"]["kernel"]
    )
    # What the basis holds of the first moment comes back whole.
    bases = basis_matrices_of(tracker_state(second))
    m = np.asarray(adam_state(start).mu["mlp"]["kernel"])
    expected = bases["mlp"] @ (bases["mlp"].T @ m)
    np.testing.assert_allclose(
        adam_state(first).mu["mlp"]["kernel"], bases["mlp"][:, :3].T @ m, atol=1e-6
    )
    lifted = adam_state(back).mu["mlp"]["kernel"]
    np.testing.assert_allclose(lifted, bases["mlp"][:, :3] @ (bases["mlp"][:, :3].T @ m), atol=1e-6)
    assert np.linalg.norm(lifted) > 0.8 * np.linalg.norm(expected) > 0
    # Leaves that are no target keep everything to the bit.
    for name in ("mu", "nu"):
        np.testing.assert_array_equal(
            getattr(adam_state(back), name)["embed"]["embedding"],
            getattr(adam_state(start), name)["embed"]["embedding"],
        )


def basis_matrices_of(tracker):
    return {"mlp": np.asarray(tracker.reduction_basis["mlp"]["kernel"])}


@pytest.mark.parametrize(
    "new",
    [
        low(mlp=3, attn=2),
        low(mlp=3, attn=2, side="output"),
        low(mlp=3, attn=2, side="both"),
        low(mlp=3, attn=2, method="svd"),
        low(mlp=3, attn=2, method="frozen"),
        low(mlp=2, attn=5, embed=3),
        low(attn=2),
        low(mlp=8, attn=2),
    ],
    ids=["same", "output", "both", "svd", "frozen", "ranks", "fewer", "P = I"],
)
def test_from_one_subspace_to_another(new):
    old = low(mlp=3, attn=2)
    start = advance(old)
    state = migrated(start, old, new)
    tracker = tracker_state(state)
    assert tracker.tracker_count == 5
    for basis in jax.tree.leaves((tracker.reduction_basis, tracker.output_basis)):
        assert_orthonormal(np.asarray(basis).reshape(-1, *basis.shape[-2:]))
    # The part of the lifted first moment that the new subspace holds is what is carried.
    whole = migrated(start, old, adamw())
    lifted = adam_state(migrated(state, new, adamw())).mu
    for path in (("mlp", "kernel"), ("attn", "q", "kernel")):
        before, after = (
            functools.reduce(lambda t, k: t[k], path, t) for t in (adam_state(whole).mu, lifted)
        )
        share = np.vdot(before, after) / np.linalg.norm(before) ** 2
        kept = np.vdot(after, after) / np.linalg.norm(before) ** 2
        np.testing.assert_allclose(share, kept, rtol=1e-4)  # an orthogonal projection
    # Training goes on, in the same types.
    after = jax.eval_shape(new.update, PARAMS, state, PARAMS)[1]
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)


LEARNED = {
    "tied": lro.learn_basis(3, targets=[("mlp/k", 3)]),
    "untied": lro.learn_basis(3, tied=False, targets=[("mlp/k", 3)]),
    "larger": lro.learn_basis(5, tied=False, targets=[("mlp/k", 5)]),
}


@pytest.mark.parametrize("new", LEARNED)
@pytest.mark.parametrize("old", ["refresh", "untied"])
def test_learned_bases(old, new):
    """To and from bases that are learned, with decoders of their own."""
    before, after = (
        low(mlp=3) if name == "refresh" else lro.logra_sketch(adamw(), LEARNED[name])
        for name in (old, new)
    )
    start = advance(before)
    assert_same(lro.migrate(start, before, before, PARAMS), start)
    state = migrated(start, before, after)
    tracker = state.tracker_state
    assert tracker.refreshes == start.tracker_state.refreshes
    if new != "tied":  # decoders start where the encoders are, or stay
        stay = (old, new) == ("untied", "untied")
        source = start.tracker_state.reduction_decoder if stay else tracker.reduction_basis
        assert_same(tracker.reduction_decoder, source)
    if new == "tied":
        assert_orthonormal(basis_matrices_of(tracker)["mlp"][None])
    # The first moment that the coordinates stand for is the same.
    lifted = [
        np.asarray(adam_state(migrated(x, tx, adamw())).mu["mlp"]["kernel"])
        for x, tx in ((start, before), (state, after))
    ]
    np.testing.assert_allclose(*lifted, atol=1e-5)
    back = migrated(state, after, low(mlp=2))
    assert_orthonormal(basis_matrices_of(back.tracker_state)["mlp"][None])


def test_identity_is_to_the_bit_and_ignores_static_differences():
    """Another method or seed changes the plan, and nothing of the arrays."""
    old, new = low(mlp=3, attn=2), low(mlp=3, attn=2, method="gram", seed=7)
    start = advance(old)
    state = migrated(start, old, new)
    for one, two in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, two)
    assert tracker_state(state).plan.tracking.needs_gradient


def test_refreshes_go_on_as_they_were_due():
    old = low(mlp=3, attn=2)
    start = advance(old, 5)
    due = tracker_state(start).next_refresh
    assert due.tolist() == [8, 8]
    grown = tracker_state(migrated(start, old, low(mlp=5, attn=2)))
    assert grown.next_refresh.tolist() == [8, 8]
    assert grown.refreshes.tolist() == [2, 2]
    # A frozen basis stays, and thaws at once.
    frozen = low(mlp=3, attn=2, method="frozen")
    cold = migrated(start, old, frozen)
    assert (tracker_state(cold).next_refresh == np.iinfo(np.int32).max).all()
    warm = migrated(cold, frozen, old)
    assert tracker_state(warm).next_refresh.tolist() == [0, 0]
    # A basis that was found in the moments is improved on at the next step, from where it is.
    fresh = tracker_state(migrated(advance(adamw()), adamw(), old))
    assert fresh.next_refresh.tolist() == [0, 0]
    assert fresh.refreshes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "side"),
    [("wide", "smaller"), ("tall", "reduction"), ("square", "both"), ("out", "smaller")]
    + [("stack", side) for side in ("smaller", "output", "both")],
)
def test_basis_is_the_leading_subspace_of_the_first_moment(name, side):
    shape, target = layout(name, side)
    params = {"w": normal(0, shape)}
    old = relaxed(optax.adam(1e-2))
    new = lro.galore_project(old, lro.refresh_basis(targets={"w": target}))
    start = advance(old, 3, params)
    # A first moment with a gap in its spectrum, so that its leading subspace is one.
    matrix, back = as_matrix(start[0].mu["w"], target, shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values[..., 2:] *= 0.05
    m = back((left * values[..., None, :]) @ right).astype(np.float32)
    start = (start[0]._replace(mu={"w": jnp.asarray(m)}), *start[1:])
    state = migrated(start, old, new, params)
    p, q = basis_matrices(state.tracker_state)
    for basis, vectors in ((p, left[..., :2]), (q, np.swapaxes(right, -1, -2)[..., :2])):
        if basis is not None:
            overlap = np.linalg.norm(np.swapaxes(basis, -1, -2) @ vectors) ** 2
            assert overlap / (2 * len(basis)) > 0.999


def test_without_a_first_moment_the_start_is_random():
    new = low(mlp=3, attn=2)
    random = new.init(PARAMS).tracker_state
    for old, inner in (
        (optax.rmsprop(1e-2), optax.rmsprop(1e-2)),
        (adamw(), None),  # before the first step its first moment is 0
    ):
        new = low(inner, mlp=3, attn=2)
        start = old.init(PARAMS) if inner is None else advance(old)
        state = migrated(start, old, new)
        for one, two in zip(
            jax.tree.leaves(state.tracker_state.reduction_basis),
            jax.tree.leaves(random.reduction_basis),
            strict=True,
        ):
            np.testing.assert_array_equal(one, two)
        assert state.tracker_state.refreshes.tolist() == [0, 0]


# Moments


def space(rank, sides=("reduction",), shape=(12, 16)):
    return Projection(0, 0, "w", "float32", make_view(shape, 0, 1), sides, rank)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, space(4)),
        (None, space(4, ("output",))),
        (None, space(4, ("reduction", "output"))),
        (space(4), None),
        (space(4, ("output",)), None),
        (space(3, ("reduction", "output")), None),
        (space(4), space(4, ("output",))),
        (space(4), space(7)),
        (space(4), space(2)),
        (space(3, ("reduction", "output")), space(5, ("reduction", "output"))),
    ],
)
def test_second_moments_are_positive_and_bound_the_next_step(old, new):
    """``c m'^2 <= v'`` in every coordinate, so no coordinate of Adam's step exceeds its rate."""
    rng = np.random.default_rng(0)

    def bases(leaf):
        if leaf is None:
            return Bases()
        sides = {"reduction": 12, "output": 16}
        return Bases(
            *(
                jnp.asarray(np.linalg.qr(rng.normal(size=(size, leaf.rank)))[0], jnp.float32)
                if side in leaf.sides
                else None
                for side, size in sides.items()
            )
        )

    nested = bool(old and new and old.sides == new.sides)
    shape = (12, 16) if old is None else old.core_shape
    m = rng.normal(size=shape)
    v = m**2 + rng.uniform(0.01, 1.0, size=shape)
    roles = (("mu", "first"), ("nu", "second"))
    moments = {"mu": jnp.asarray(m, jnp.float32), "nu": jnp.asarray(v, jnp.float32)}
    moved = reencode.reencode(
        old, new, nested, roles, bases(old), bases(new), moments, jnp.ones([])
    )
    assert moved["nu"].shape == ((12, 16) if new is None else new.core_shape)
    assert (moved["nu"] > 0).all()
    assert (jnp.square(moved["mu"]) <= 1.0001 * moved["nu"]).all()


def test_second_moment_of_a_core_against_the_truth():
    """Of gradients with independent entries around a mean, the rule is exact in expectation."""
    rng = np.random.default_rng(1)
    mean = np.outer(np.ones(12), rng.normal(size=16))  # small entries that add up
    spread = rng.uniform(0.1, 1.0, size=(12, 16))
    p = np.linalg.qr(np.concatenate([np.ones((12, 1)), rng.normal(size=(12, 3))], axis=1))[0]
    roles = (("mu", "first"), ("nu", "second"))
    moved = reencode.reencode(
        None,
        space(4),
        False,
        roles,
        Bases(),
        Bases(jnp.asarray(p, jnp.float32), None),
        {"mu": jnp.asarray(mean, jnp.float32), "nu": jnp.asarray(mean**2 + spread**2, jnp.float32)},
        jnp.ones([]),
    )
    samples = mean + spread * rng.normal(size=(20000, 12, 16))
    truth = np.mean((p.T @ samples) ** 2, axis=0)
    np.testing.assert_allclose(moved["nu"], truth, rtol=0.05)
    # Along the mean, the plain rule (P∘P)ᵀv sees a twelfth of its square.
    plain = (p**2).T @ (mean**2 + spread**2)
    assert np.median(plain[0] / truth[0]) < 0.4


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_bias_corrections_are_accounted_for(steps):
    """A constant gradient's second moment is the square of its first, at any count."""
    params = {"w": normal(0, (8, 12))}
    old = relaxed(optax.adam(1e-2))
    tx = lro.galore_project(old, lro.refresh_basis(3, targets=[("w", 3)]))
    state = old.init(params)
    update = jax.jit(old.update)
    for _ in range(steps):
        _, state = update(params, state)
    moved = migrated(state, old, tx, params).inner_state[0]
    m = moved.mu["w"] / (1 - 0.9**steps)
    v = moved.nu["w"] / (1 - 0.999**steps)
    np.testing.assert_allclose(v, m**2, rtol=1e-3)


@pytest.mark.parametrize(("rank", "columns"), [(3, 5), (3, 9), (5, 2), (4, 4)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_resized_basis(rank, columns, batch):
    start = np.linalg.qr(np.random.default_rng(0).normal(size=(*batch, 10, columns)))[0]
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(*batch, 10, rank)))[0]
    if columns > rank:  # a start that the basis holds part of already
        basis[..., :2] = start[..., -2:]
        basis = np.linalg.qr(basis)[0]
    basis, start = jnp.asarray(basis, jnp.float32), jnp.asarray(start, jnp.float32)
    result = np.asarray(resize(basis, start, len(batch)))
    kept = min(rank, columns)
    np.testing.assert_array_equal(result[..., :kept], basis[..., :kept])
    assert_orthonormal(result)


# Counts, hyperparameters, other optimizers


def test_schedules_go_on():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    old = relaxed(optax.adamw(schedule))
    new = low(old, mlp=3)
    state = migrated(advance(old, 5), old, new)
    counts = [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]
    assert counts == [5, 5]
    # A schedule that the old optimizer did not have begins where the run is.
    state = migrated(advance(adamw(), 5), adamw(), new)
    assert [int(x) for _, x in optax.tree.get_all_with_path(state, "count")] == [5, 5]


def test_hyperparameters_set_by_hand_stay_and_new_ones_are_new():
    def injected(rank, rate):
        return optax.inject_hyperparams(
            lambda learning_rate, b1: low(relaxed(optax.adam(learning_rate, b1)), mlp=rank)
        )(learning_rate=rate, b1=0.9)

    old = injected(3, 0.1)
    state = advance(old, 2)
    state.hyperparams["learning_rate"] = jnp.asarray(0.025)
    same = migrated(state, old, injected(4, 0.1))
    assert float(same.hyperparams["learning_rate"]) == pytest.approx(0.025)
    other = migrated(state, old, injected(4, 0.7))
    assert float(other.hyperparams["learning_rate"]) == pytest.approx(0.7)


def test_accumulated_gradients_move_too():
    """In the middle of an accumulation, outside of the subspace or inside it."""
    outside = accumulating(low(mlp=3), 4)
    grown = accumulating(low(mlp=5), 4)
    inside = low(accumulating(adamw(), 4), mlp=3)
    start = advance(outside, 6)
    assert_same(migrated(start, outside, grown).acc_grads, start.acc_grads)
    moved = migrated(start, outside, inside)
    assert moved.inner_state.mini_step == 2
    p = basis_matrices_of(moved.tracker_state)["mlp"]
    np.testing.assert_allclose(
        moved.inner_state.acc_grads["mlp"]["kernel"],
        p.T @ np.asarray(start.acc_grads["mlp"]["kernel"]),
        atol=1e-5,
    )


INNERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "lion": relaxed(optax.lion(1e-2)),
    "rmsprop": relaxed(optax.rmsprop(1e-2, momentum=0.9)),
    "amsgrad": relaxed(optax.amsgrad(1e-2)),
    "adabelief": relaxed(optax.adabelief(1e-2)),
    "adan": relaxed(optax.adan(1e-2)),
    "yogi": relaxed(optax.yogi(1e-2)),
}


@pytest.mark.filterwarnings("ignore:galore_project. the inner optimizer is Lion")
@pytest.mark.parametrize("name", INNERS)
def test_any_inner_optimizer(name):
    inner = INNERS[name]
    new = low(inner, mlp=3, attn=2)
    state = migrated(advance(inner), inner, new)
    larger = low(inner, mlp=4, attn=2)
    state = migrated(state, new, larger)
    migrated(state, larger, inner)


@pytest.mark.filterwarnings("ignore:galore_project. the inner optimizer is Lion")
def test_a_moment_of_another_optimizer():
    """Adam's averages serve Lion; what Lion lacks is named."""
    adam, lion = relaxed(optax.adam(1e-2)), relaxed(optax.lion(1e-2))
    new = low(lion, mlp=3)
    state = migrated(advance(adam), adam, new)
    assert jnp.any(state.inner_state[0].mu["mlp"]["kernel"] != 0)
    with pytest.warns(UserWarning, match=r"ScaleByAdamState.nu of 'attn/q/kernel'"):
        back = migrated(state, new, adam)
    assert not jnp.any(back[0].nu["mlp"]["kernel"])


def test_unrecognised_fields_are_kept_where_they_fit_and_named_where_not():
    inner = relaxed(optax.ema(0.9))  # its field has a name that no rule knows
    old, new = low(inner, mlp=3, attn=2), low(inner, mlp=5, attn=2)
    start = advance(old)
    with pytest.warns(UserWarning, match=r"EmaState.ema of 'mlp/kernel': the old state") as record:
        state = lro.migrate(start, old, new, PARAMS)
    assert "attn" not in str(record[0].message)
    assert not jnp.any(state.inner_state.ema["mlp"]["kernel"])
    np.testing.assert_array_equal(
        state.inner_state.ema["attn"]["q"]["kernel"], start.inner_state.ema["attn"]["q"]["kernel"]
    )


def test_adafactor_keeps_what_fits():
    inner = relaxed(optax.adafactor(1e-2, min_dim_size_to_factor=4))
    old, new = low(inner, mlp=4), low(inner, mlp=5)
    with pytest.warns(UserWarning, match=r"FactoredState\.v_\w+ of 'mlp/kernel'"):
        migrated(advance(old), old, new)


def test_metrics_are_unknown_after_other_targets():
    def watched(**ranks):
        return lro.galore_project(
            adamw(), lro.refresh_basis(targets=targets(**ranks)), metrics=True
        )

    old = watched(mlp=3, attn=2)
    start = advance(old)
    assert_same(migrated_metrics(start, old, old).fidelity, start.fidelity)
    moved = migrated_metrics(start, old, watched(mlp=3, embed=2))
    assert np.isnan(moved.fidelity.energy).all()


def migrated_metrics(state, old, new):
    return lro.migrate(state, old, new, PARAMS)


# Trees, dtypes, compilation


def test_under_jit_and_donation():
    old, new = low(mlp=3, attn=2), low(mlp=4, embed=2)
    state = advance(old)
    expected = migrated(state, old, new)
    move = jax.jit(lambda state: lro.migrate(state, old, new, PARAMS), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every buffer finds a use
        result = move(jax.tree.map(jnp.copy, state))
    assert avals(result) == avals(expected)
    for one, two in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_bfloat16_params_none_leaves_and_boxes():
    params = {
        "w": nnx.Param(normal(0, (8, 12), jnp.bfloat16)),
        "none": None,
        "b": jnp.ones(3, jnp.bfloat16),
    }
    old = relaxed(optax.adam(1e-2))
    new = lro.galore_project(old, lro.refresh_basis(3, targets=[("^w", 3)]))
    state = old.init(params)
    _, state = jax.jit(old.update)(params, state, params)
    result = lro.migrate(state, old, new, params)
    assert avals(result) == avals(new.init(params))
    assert avals(lro.migrate(result, new, old, params)) == avals(state)


def test_restored_numpy_arrays_will_do():
    old, new = low(mlp=3, attn=2), low(mlp=4, attn=2)
    start = advance(old)
    assert_same(
        lro.migrate(jax.tree.map(np.asarray, start), old, new, PARAMS),
        lro.migrate(start, old, new, PARAMS),
    )


# Errors


def test_errors_name_the_leaf_and_the_fix():
    old, new = low(mlp=3), low(mlp=4)
    state = old.init(PARAMS)
    with pytest.raises(
        ValueError, match=r"reduction_basis/mlp/kernel' it has float32\[8, 3\].*old_tx"
    ):
        lro.migrate(state, low(mlp=5), adamw(), PARAMS)
    with pytest.raises(ValueError, match=r"it fits new_tx: were the two swapped"):
        lro.migrate(state, new, old, PARAMS)
    with pytest.raises(ValueError, match=r"nothing at '0/count', expected int32\[\]"):
        lro.migrate(state, adamw(), new, PARAMS)
    other = {**PARAMS, "mlp": {"kernel": jnp.ones((8, 20)), "bias": jnp.ones(20)}}
    with pytest.raises(
        ValueError, match=r"mu/mlp/bias' it has float32\[12\], expected float32\[20\]"
    ):
        lro.migrate(state, old, new, other)
    with pytest.raises(TypeError, match="old_tx must be a gradient transformation"):
        unchecked(lro.migrate)(state, PARAMS, new, PARAMS)
    with pytest.raises(ValueError, match="unexpected"):
        lro.migrate((state, state.inner_state), optax.chain(old), new, PARAMS)
