import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._subspace import metrics, nonlinearity, optimizer
from tests.helpers.assertions import as_matrix, basis_matrices, lift, project
from tests.helpers.data import LAYOUTS, layout, normal, random_like
from tests.helpers.loops import relaxed

SIDES = {
    "wide": "smaller",
    "tall": "smaller",
    "square": "both",
    "out": "reduction",
    "stack": "both",
}
PARAMS = {name: normal(i, LAYOUTS[name][0]) for i, name in enumerate(SIDES)} | {"bias": jnp.ones(3)}
TARGETS = {name: layout(name, side)[1] for name, side in SIDES.items()} | {"bias": None}


def watched(**options):
    tracker = lro.refresh_basis(every=3, targets=TARGETS)
    return lro.galore_project(optax.sgd(0.1), tracker, metrics=True, **options)


def test_no_two_arrays_of_a_new_state_share_memory():
    """Or a step that donates it is refused."""
    state = watched().init(PARAMS)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@pytest.fixture(scope="module")
def steps():
    """Gradients of three steps and the states after each."""
    tx = watched()
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    result = [(None, state)]
    for step in range(3):
        gradients = random_like(PARAMS, step)
        _, state = update(gradients, state, PARAMS)
        result.append((gradients, state))
    return result


def by_hand(gradient, target, bases):
    g, _ = as_matrix(gradient, target, gradient.shape)
    core = project(g, *bases)
    a = lift(core, *bases)
    norm = np.linalg.norm
    g, a, core = (x.ravel() for x in (g, a, core))
    return {
        "energy": norm(core) ** 2 / norm(g) ** 2,
        "distortion": norm(g - a) / norm(g),
        "effective_snr": norm(a) / norm(g - a),
        "grad_norm_ratio": norm(a) / norm(g),
        "cosine": g @ a / norm(g) / norm(a),
        "sign_flip_rate": np.mean(np.sign(g) != np.sign(a)),
    }


@pytest.mark.parametrize("step", [1, 2, 3])
def test_values_against_numpy(steps, step):
    gradients, state = steps[step]
    report = lro.metrics(state)
    assert sorted(report.leaves) == sorted(SIDES)
    for name in SIDES:
        bases = basis_matrices(state.tracker_state, name)
        expected = by_hand(gradients[name], TARGETS[name], bases)
        for field, value in expected.items():
            got = float(getattr(report.leaves[name], field))
            assert got == pytest.approx(value, rel=2e-4, abs=1e-6), (name, field)
        eps = expected["distortion"]
        assert float(report.leaves[name].effective_snr) == pytest.approx(
            np.sqrt(1 - eps**2) / eps, rel=1e-3
        )


def test_worst_and_layer_snr_min_and_its_leaf(steps):
    report = lro.metrics(steps[2][1])
    snr = {name: float(leaf.effective_snr) for name, leaf in report.leaves.items()}
    worst = min(snr, key=snr.get)
    assert len(set(snr.values())) == len(snr)
    assert report.layer_snr_min_leaf == worst
    assert float(report.layer_snr_min) == snr[worst] == float(report.worst.effective_snr)
    for field in metrics.Fidelity._fields:
        values = [float(getattr(leaf, field)) for leaf in report.leaves.values()]
        pick = max if field in ("distortion", "sign_flip_rate") else min
        assert float(getattr(report.worst, field)) == pick(values)


def test_refresh_counts(steps):
    assert {int(x) for x in lro.metrics(steps[1][1]).refreshes.values()} == {1}
    assert {int(x) for x in lro.metrics(steps[3][1]).refreshes.values()} == {1}
    _, state = jax.jit(watched().update)(random_like(PARAMS, 9), steps[3][1], PARAMS)
    assert {int(x) for x in lro.metrics(state).refreshes.values()} == {2}


def test_nan_before_the_first_update(steps):
    report = lro.metrics(steps[0][1])
    assert all(np.isnan(x) for leaf in report.leaves.values() for x in leaf)
    assert {int(x) for x in report.refreshes.values()} == {0}


def test_prints_a_table(steps):
    lines = str(lro.metrics(steps[1][1])).splitlines()
    assert lines[0].split() == ["leaf", *metrics.Fidelity._fields, "refreshes"]
    assert [line.split()[0] for line in lines[1:]] == sorted(SIDES)


def test_without_metrics_is_an_error_that_says_how():
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(targets=TARGETS))
    with pytest.raises(ValueError, match="metrics=True"):
        lro.metrics(tx.init(PARAMS))
    with pytest.raises(ValueError, match="holds no metrics"):
        lro.metrics(optax.sgd(0.1).init(PARAMS))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(100.0), tx, optax.scale(0.5)),
        lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.masked(tx, {name: name != "bias" for name in PARAMS}),
        lambda tx: optax.partition(
            {"all": tx, "rest": optax.sgd(0.1)},
            {name: "rest" if name == "bias" else "all" for name in PARAMS},
        ),
    ],
    ids=["chain", "multi_steps", "apply_if_finite", "masked", "partition"],
)
def test_found_through_wrappers(steps, wrap):
    targets = [(name, target) for name, target in TARGETS.items() if target is not None]
    tracker = lro.refresh_basis(every=3, targets=targets)
    tx = relaxed(wrap(lro.galore_project(optax.sgd(0.1), tracker, metrics=True)))
    _, state = jax.jit(tx.update)(steps[1][0], tx.init(PARAMS), PARAMS)
    report, expected = lro.metrics(state), lro.metrics(steps[1][1])
    assert sorted(report.leaves) == sorted(SIDES)
    for name in SIDES:
        np.testing.assert_allclose(
            report.leaves[name].energy, expected.leaves[name].energy, rtol=1e-3
        )


def test_two_subspace_optimizers_report_together():
    params = {"a": normal(0, (6, 10)), "c": normal(1, (10, 6))}
    tx = optax.partition(
        {
            "low": lro.galore_project(optax.sgd(0.1), lro.refresh_basis(1), metrics=True),
            "high": lro.galore_project(optax.sgd(0.1), lro.refresh_basis(5), metrics=True),
        },
        {"a": "low", "c": "high"},
    )
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    report = lro.metrics(state)
    assert sorted(report.leaves) == ["a", "c"]
    assert report.layer_snr_min_leaf == "a"


def test_nothing_is_lost_where_the_gradient_has_the_rank():
    params = {"w": normal(0, (6, 2)) @ normal(1, (2, 10))}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2), metrics=True)
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    leaf = lro.metrics(state).leaves["w"]
    assert float(leaf.energy) == pytest.approx(1, abs=1e-5)
    assert float(leaf.distortion) < 1e-3
    assert float(leaf.effective_snr) > 1e3
    assert np.isfinite(leaf).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1e18, 1e30])
def test_fidelity_is_finite_and_free_of_units(scale):
    g, a, c = normal(0, (6, 10)), normal(1, (6, 10)), normal(2, (2, 10))
    with jax.numpy_dtype_promotion("standard"):
        got = metrics.fidelity(scale * g, scale * c, scale * a)
        expected = metrics.fidelity(g, c, a)
    assert np.isfinite(np.asarray(got)).all()
    if scale:
        np.testing.assert_allclose(got, expected, rtol=1e-4)
    else:
        assert float(got.energy) == float(got.cosine) == float(got.grad_norm_ratio) == 1
        assert float(got.distortion) == float(got.sign_flip_rate) == 0


def test_exact_approximation_has_the_largest_snr_and_no_nan():
    g = normal(0, (6, 10))
    got = metrics.fidelity(g, g, g)
    assert float(got.effective_snr) == pytest.approx(1e7)
    assert float(got.distortion) == 0
    lost = metrics.fidelity(g, jnp.zeros((2, 10)), jnp.zeros((6, 10)))
    assert np.isfinite(np.asarray(lost)).all()
    assert float(lost.effective_snr) == 0
    assert float(lost.distortion) == pytest.approx(1)


def test_bfloat16_gradients():
    params = {"w": normal(0, (6, 10), jnp.bfloat16)}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(2), metrics=True)
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert state.fidelity.energy.dtype == jnp.float32
    bases = basis_matrices(state.tracker_state)
    expected = by_hand(params["w"].astype(jnp.float32), lro.Target(2), bases)
    assert float(lro.metrics(state).leaves["w"].energy) == pytest.approx(
        expected["energy"], rel=1e-3
    )


def test_a_sketch_that_is_longer_than_its_gradient_can_be_the_worst():
    params = {"a": normal(0, (6, 10)), "long": normal(1, (6, 10))}

    def doubling(view, sides, core, gradient):
        return jnp.where(gradient[0, 0] == params["long"][0, 0], 4 * core, core)

    tx = optimizer.subspace_optimizer(
        "a test",
        None,
        lro.refresh_basis(2),
        scale=1.0,
        lift=None,
        moments="keep",
        metrics=True,
        nonlinearity=nonlinearity.Nonlinearity("doubling", doubling, needs_gradient=True),
    )
    _, state = tx.update(params, tx.init(params))
    report = lro.metrics(state)
    ratios = {path: float(leaf.grad_norm_ratio) for path, leaf in report.leaves.items()}
    assert ratios["a"] < 1 < 2 < ratios["long"]
    assert float(report.worst.grad_norm_ratio) == ratios["long"]
