import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._arrays import tree
from lowrank_optax._inner import carry as _moments
from tests.helpers.assertions import lift, swap
from tests.helpers.data import LAYOUTS, layout, normal, random_like
from tests.helpers.loops import relaxed

NAMES = ("wide", "tall", "square", "out", "stack")
SIDES = {
    "wide": "smaller",
    "tall": "smaller",
    "square": "both",
    "out": "reduction",
    "stack": "both",
}
B1, B2 = 0.8, 0.95


def random_orthonormal(seed, shape):
    """``(*side, r)`` with orthonormal columns."""
    x = np.random.default_rng(seed).normal(size=shape).reshape(-1, shape[-1])
    return np.linalg.qr(x)[0].reshape(shape)


class Problem:
    """Cores of several layouts, their old and new bases, and which of them were refreshed."""

    def __init__(self, new="random", refreshed=True):
        params = {name: jnp.zeros(LAYOUTS[name][0]) for name in NAMES}
        targets = {name: layout(name, SIDES[name])[1] for name in NAMES}
        params["bias"], targets["bias"] = jnp.zeros(5), None
        state = lro.refresh_basis(targets=targets).init(params)
        self.plan = state.plan
        self.old = [
            lro.Bases(*(None if b is None else self._basis(i, b.shape) for b in bases))
            for i, bases in enumerate(state.encoders())
        ]
        self.new = [
            lro.Bases(*(None if b is None else self._next(new, i, b) for b in bases))
            for i, bases in enumerate(self.old)
        ]
        flags = refreshed if isinstance(refreshed, list) else [refreshed] * len(NAMES)
        self.refreshed = dict(zip(sorted(NAMES), flags, strict=True))
        shapes = {p.path: p.core_shape for p in self.plan.projections}
        self.cores = {path: jnp.zeros(shapes.get(path, x.shape)) for path, x in params.items()}

    def _basis(self, seed, shape):
        if len(shape) == 3 and shape[0] == 3:  # the scanned layout: each matrix has its own
            layers = [random_orthonormal(10 * seed + k, shape[1:]) for k in range(3)]
            return jnp.asarray(np.stack(layers), jnp.float32)
        return jnp.asarray(random_orthonormal(10 * seed, shape), jnp.float32)

    def _next(self, kind, seed, old):
        if kind == "same":
            return old
        if kind == "turned":  # another basis of the same subspace
            turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(2, 2)))[0]
            return jnp.asarray(np.asarray(old, np.float64) @ turn, jnp.float32)
        return self._basis(100 + seed, old.shape)

    def change(self):
        return _moments.Change(
            self.plan.projections,
            self.new,
            lambda: self.old,
            jnp.asarray([self.refreshed[p.path] for p in self.plan.projections]),
        )

    def rotations(self, name):
        """R of both sides as ``(batch, r, r)`` in float64; None where a side has no basis."""
        (projection,) = (p for p in self.plan.projections if p.path == name)
        number, batch = projection.number, int(np.prod(projection.view.batch_shape))
        result = []
        for new, old in zip(self.new[number], self.old[number], strict=True):
            if new is None:
                result.append(None)
                continue
            new, old = (np.asarray(b, np.float64).reshape(batch, -1, 2) for b in (new, old))
            result.append(swap(new) @ old)
        return result

    def matrices(self, name, core):
        """A core as ``(batch, left, right)`` in float64."""
        leaf = next(leaf for leaf in self.plan.leaves if leaf.path == name)
        core = np.asarray(core, np.float64)
        batch = int(np.prod(leaf.view.batch_shape))
        left = 2 if "reduction" in leaf.sides else leaf.view.rows
        return core.reshape(batch, left, -1)

    def carry(self, inner, state, rule="rotate", count=0, **extra_args):
        @jax.jit
        def run(state, cores):
            change = self.change()
            count_ = jnp.asarray(count, jnp.int32)
            inner_ = optax.with_extra_args_support(inner)
            return _moments.carry(rule, inner_, state, cores, change, count_, extra_args)

        return run(state, self.cores)

    def warm(self, inner, steps=3):
        """The inner state after some steps of random gradients."""
        inner = optax.with_extra_args_support(inner)
        state = inner.init(self.cores)
        update = jax.jit(lambda g, s: inner.update(g, s, self.cores)[1])
        for step in range(steps):
            state = update(random_like(self.cores, step), state)
        return state

    def expected_first(self, name, moment):
        return lift(self.matrices(name, moment), *self.rotations(name))

    def expected_second(self, name, second, first=None, ratio=1.0):
        r, s = self.rotations(name)
        squares = [None if x is None else x**2 for x in (r, s)]
        second = self.matrices(name, second)
        if first is None:
            return np.abs(lift(second, *squares))
        mean = self.matrices(name, first)
        variance = lift(second - ratio * mean**2, *squares)
        return np.abs(variance + ratio * lift(mean, r, s) ** 2)


@functools.cache
def adam_problem():
    problem = Problem()
    inner = relaxed(optax.scale_by_adam(B1, B2))
    return problem, inner, problem.warm(inner)


def ratio(steps, b1=B1, b2=B2):
    """c of the rule: the weight of the second moment over the squared weight of the first."""
    return (1 - b2**steps) / (1 - b1**steps) ** 2


def test_first_moments_rotate_and_second_moments_follow_the_rule():
    problem, inner, state = adam_problem()
    after = problem.carry(inner, state)
    for name in NAMES:
        mu = problem.matrices(name, after.mu[name])
        np.testing.assert_allclose(mu, problem.expected_first(name, state.mu[name]), atol=1e-5)
        nu = problem.expected_second(name, state.nu[name], state.mu[name], ratio(3))
        np.testing.assert_allclose(problem.matrices(name, after.nu[name]), nu, atol=1e-5)
        assert (np.asarray(after.nu[name]) >= 0).all()
    # No target, no change; and the count goes on.
    for field in ("mu", "nu"):
        np.testing.assert_array_equal(getattr(after, field)["bias"], getattr(state, field)["bias"])
    assert after.count == state.count


def test_leaves_that_were_not_refreshed_stay_bit_for_bit():
    problem = Problem(refreshed=[True, False, False, True, False])
    inner = relaxed(optax.scale_by_adam(B1, B2))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    for name in NAMES:
        for field in ("mu", "nu"):
            same = np.array_equal(getattr(after, field)[name], getattr(state, field)[name])
            assert same != problem.refreshed[name], name


@pytest.mark.parametrize("rule", ["rotate", "reset", lambda state, _: 1 / 0])
def test_nothing_happens_where_nothing_was_refreshed(rule):
    problem = Problem(refreshed=False)
    inner = relaxed(optax.scale_by_adam(B1, B2))
    state = problem.warm(inner)
    if callable(rule):
        with pytest.raises(ZeroDivisionError):  # it is traced, if never run
            problem.carry(inner, state, rule)
        return
    after = problem.carry(inner, state, rule)
    for one, two in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, two)


def test_another_basis_of_the_same_subspace_keeps_the_momentum():
    problem = Problem("turned")
    inner = relaxed(optax.scale_by_adam(B1, B2))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    projections = {p.path: p for p in problem.plan.projections}
    for name in NAMES:
        view, number = projections[name].view, projections[name].number
        before = view.lift(state.mu[name], problem.old[number])
        now = view.lift(after.mu[name], problem.new[number])
        np.testing.assert_allclose(now, before, atol=1e-5)
        assert not np.allclose(after.mu[name], state.mu[name], atol=1e-2)


def test_the_same_basis_keeps_both_moments():
    problem = Problem("same")
    inner = relaxed(optax.scale_by_adam(B1, B2))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    for name in NAMES:
        np.testing.assert_allclose(after.mu[name], state.mu[name], atol=1e-5)
        np.testing.assert_allclose(after.nu[name], state.nu[name], atol=1e-5)


def test_keep_leaves_everything_stale():
    problem, inner, state = adam_problem()
    assert problem.carry(inner, state, "keep") is not None
    after = problem.carry(inner, state, "keep")
    for one, two in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, two)


def test_reset_starts_refreshed_targets_again_and_keeps_the_count():
    problem = Problem(refreshed=[True, False, True, True, False])
    inner = relaxed(optax.chain(optax.clip(10.0), optax.adam(0.1, B1, B2), optax.trace(0.9)))
    state = problem.warm(inner)
    after = problem.carry(inner, state, "reset")
    for field in ("mu", "nu", "trace"):
        before, now = optax.tree.get(state, field), optax.tree.get(after, field)
        for name in (*NAMES, "bias"):
            if problem.refreshed.get(name, False):
                assert not np.asarray(now[name]).any()
            else:
                np.testing.assert_array_equal(now[name], before[name])
    counts = [x for _, x in optax.tree.get_all_with_path(after, "count")]
    assert counts
    assert all(count == 3 for count in counts)


def test_a_callable_gets_the_state_and_every_rotation():
    problem, inner, state = adam_problem()

    def rule(inner_state, rotations):
        assert sorted(rotations) == sorted(NAMES)
        mu = dict(inner_state.mu)
        # The transpose of what "rotate" does, to tell the two apart.
        mu["wide"] = rotations["wide"].reduction.T @ mu["wide"]
        assert rotations["wide"].output is None
        return inner_state._replace(mu=mu)

    after = problem.carry(inner, state, rule)
    expected = lift(
        problem.matrices("wide", state.mu["wide"]), swap(problem.rotations("wide")[0]), None
    )
    np.testing.assert_allclose(after.mu["wide"], expected[0], atol=1e-5)
    np.testing.assert_array_equal(after.mu["tall"], state.mu["tall"])
    np.testing.assert_array_equal(after.nu["wide"], state.nu["wide"])


# Through wrappers


def masked_off_bias(params):
    return {name: name != "bias" for name in params}


def labels(params):
    return {name: "one" if name < "r" else "two" for name in params}


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e3), tx, optax.scale(-0.1)),
    "masked": lambda tx: optax.masked(tx, masked_off_bias),
    "partition": lambda tx: optax.partition({"one": tx, "two": tx}, labels),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "lists": lambda tx: optax.chain(
        optax.chain(tx), optax.masked(optax.trace(0.9), masked_off_bias)
    ),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "skip_not_finite": lambda tx: optax.MultiSteps(
        tx, 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}


def check_rotated(problem, before, after, steps=3, b1=B1, b2=B2):
    """Checks every mu and nu of two states, wherever they are."""
    seen = set()
    for node, moved in zip(nodes(before), nodes(after), strict=True):
        mu, nu = tree.by_path(node.mu), tree.by_path(node.nu)
        new_mu, new_nu = tree.by_path(moved.mu), tree.by_path(moved.nu)
        for name in set(mu) & set(NAMES):
            seen.add(name)
            np.testing.assert_allclose(
                problem.matrices(name, new_mu[name]),
                problem.expected_first(name, mu[name]),
                atol=1e-5,
            )
            np.testing.assert_allclose(
                problem.matrices(name, new_nu[name]),
                problem.expected_second(name, nu[name], mu[name], ratio(steps, b1, b2)),
                atol=1e-5,
            )
    assert seen == set(NAMES)


def nodes(state):
    def is_adam(x):
        return isinstance(x, optax.ScaleByAdamState)

    return [x for x in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(x)]


@pytest.mark.parametrize("name", WRAPPERS)
def test_rotation_reaches_through(name):
    problem = Problem()
    inner = relaxed(WRAPPERS[name](optax.scale_by_adam(B1, B2)))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    check_rotated(problem, state, after)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
def test_bias_corrections_are_read_off_injected_decay_rates(b1, b2):
    problem = Problem()
    inner = relaxed(
        optax.inject_hyperparams(optax.adam)(
            learning_rate=0.1, b1=b1, b2=optax.constant_schedule(b2)
        )
    )
    state = problem.warm(inner)
    check_rotated(problem, state, problem.carry(inner, state), 3, b1, b2)


def test_hyperparams_changed_in_the_state_count():
    problem = Problem()
    inner = relaxed(optax.inject_hyperparams(optax.adam)(learning_rate=0.1, b1=0.9, b2=0.9))
    state = problem.warm(inner)
    state.hyperparams["b2"] = jnp.asarray(0.5, state.hyperparams["b2"].dtype)
    check_rotated(problem, state, problem.carry(inner, state), 3, 0.9, 0.5)


def test_accumulated_gradients_of_multi_steps_inside_rotate():
    """Half a batch gathered in the old basis must not be added to the other half in the new."""
    problem = Problem()
    inner = relaxed(optax.MultiSteps(optax.scale_by_adam(B1, B2), 4).gradient_transformation())
    state = problem.warm(inner, 6)
    after = problem.carry(inner, state)
    check_rotated(problem, state, after, 1)
    for name in NAMES:
        assert np.asarray(state.acc_grads[name]).any()
        np.testing.assert_allclose(
            problem.matrices(name, after.acc_grads[name]),
            problem.expected_first(name, state.acc_grads[name]),
            atol=1e-5,
        )


# Other optimizers' moments


@pytest.mark.parametrize(
    ("make", "firsts", "seconds"),
    [
        (lambda: optax.sgd(0.1, momentum=0.9), ["trace"], []),
        (lambda: optax.lion(0.1), ["mu"], []),
        (lambda: optax.rmsprop(0.1), [], ["nu"]),
        (lambda: optax.adagrad(0.1), [], ["sum_of_squares"]),
        (lambda: optax.amsgrad(0.1, B1, B2), ["mu"], ["nu_max"]),
        (lambda: optax.adabelief(0.1, B1, B2), ["mu"], ["nu"]),
        (lambda: optax.adan(0.1), ["m", "v", "g"], ["n"]),
    ],
    ids=["sgd", "lion", "rmsprop", "adagrad", "amsgrad", "adabelief", "adan"],
)
def test_moments_of(make, firsts, seconds):
    problem = Problem()
    inner = relaxed(make())
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    for name in NAMES:
        for field in firsts:
            before, now = (optax.tree.get(s, field)[name] for s in (state, after))
            expected = problem.expected_first(name, before)
            np.testing.assert_allclose(problem.matrices(name, now), expected, atol=1e-5)
        for field in seconds:
            before, now = (optax.tree.get(s, field)[name] for s in (state, after))
            expected = problem.expected_second(name, before)
            np.testing.assert_allclose(problem.matrices(name, now), expected, atol=1e-4)
            assert (np.asarray(now) >= 0).all()


def test_yogi_is_an_adam_with_the_same_bias():
    problem = Problem()
    inner = relaxed(optax.scale_by_yogi(B1, B2, initial_accumulator_value=0.0))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    for name in NAMES:
        expected = problem.expected_first(name, state.mu[name])
        np.testing.assert_allclose(problem.matrices(name, after.mu[name]), expected, atol=1e-5)
        assert (np.asarray(after.nu[name]) >= 0).all()


@pytest.mark.parametrize("make", [lambda: optax.novograd(0.1), lambda: optax.adafactor(0.1, 2)])
def test_what_has_another_shape_than_a_core_is_kept(make):
    problem = Problem()
    inner = relaxed(make())
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    changed = []
    paths, befores, _ = tree.flatten_with_paths(state)
    for path, before, now in zip(paths, befores, jax.tree.leaves(after), strict=True):
        if not np.array_equal(before, now):
            name = path.rsplit("/", 1)[1]
            changed.append(path)
            assert before.shape == problem.cores[name].shape
    assert all("v_row" not in path and "v_col" not in path for path in changed)


def test_describe_names_what_is_kept():
    params = {"w": jnp.zeros((200, 300))}
    tracker = lro.refresh_basis(130)
    notes = lro.describe(lro.galore_project(optax.adafactor(0.1), tracker), params).notes
    assert any("FactoredState.v_row" in note and "kept" in note for note in notes)
    assert lro.describe(lro.galore_project(optax.adam(0.1), tracker), params).notes == ()


def test_moments_in_bfloat16_stay_in_bfloat16():
    problem = Problem()
    inner = relaxed(optax.scale_by_adam(B1, B2, mu_dtype=jnp.bfloat16))
    state = problem.warm(inner)
    after = problem.carry(inner, state)
    for name in NAMES:
        assert after.mu[name].dtype == jnp.bfloat16
        expected = problem.expected_first(name, state.mu[name].astype(jnp.float32))
        np.testing.assert_allclose(problem.matrices(name, after.mu[name]), expected, atol=2e-2)


def test_moments_before_the_first_step_stay_zero():
    problem = Problem()
    inner = relaxed(optax.adam(0.1))
    after = problem.carry(inner, inner.init(problem.cores))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(after))


def test_momentum_survives_a_refresh_in_training():
    """Flora re-encodes its momentum with the wrong key: after a refresh it is noise."""
    params = {"w": jnp.zeros((12, 16))}
    left, right = normal(0, (12, 3)), normal(1, (3, 16))
    tx = lro.galore_project(
        optax.trace(0.9), lro.refresh_basis(4, 1, method="subspace"), moments="rotate"
    )
    state = tx.init(params)
    update = jax.jit(tx.update)
    full = np.zeros((12, 16))
    for step in range(6):
        gradient = left @ right + 0.05 * normal(10 + step, (12, 16))
        full = 0.9 * full + np.asarray(gradient)
        updates, state = update({"w": gradient}, state, params)
    cosine = np.sum(full * updates["w"]) / np.linalg.norm(full) / np.linalg.norm(updates["w"])
    assert cosine > 0.99
    assert np.linalg.norm(updates["w"]) == pytest.approx(np.linalg.norm(full), rel=0.05)
