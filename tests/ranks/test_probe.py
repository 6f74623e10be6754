"""Spectra and ranks against NumPy in float64, tables, text, figure and errors."""

import builtins

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax._ranks.spectrum import METRICS, needed_ranks
from tests.helpers.assertions import as_matrix, unchecked
from tests.helpers.data import layout, normal

BATCHES = 4


def gradient(seed, shape, target, rank):
    """A gradient whose matrices have a falling spectrum of some rank, and a little noise."""
    rng = np.random.default_rng(seed)
    _, back = as_matrix(np.zeros(shape), target, shape)
    matrix, _ = as_matrix(rng.normal(size=shape), target, shape)
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    values = np.where(np.arange(left.shape[-1]) < rank, 2.0 ** -np.arange(left.shape[-1]), 1e-2)
    return jnp.asarray(back((left * values) @ right), jnp.float32)


def expected_rank(singular_values, share, metric):
    weights = singular_values ** (2 if metric == "energy" else 1)
    for rank in range(1, len(weights)):
        if weights[:rank].sum() >= share * weights.sum():
            return rank
    return len(weights)


@pytest.mark.parametrize("mode", ["pooled", "per_batch"])
@pytest.mark.parametrize("metric", ["energy", "nuclear"])
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("wide", "smaller"),
        ("tall", "smaller"),
        ("wide", "output"),
        ("out", "reduction"),
        ("stack", "smaller"),
        ("experts", "smaller"),
        ("square", "both"),
    ],
)
def test_against_numpy(name, side, metric, mode):
    shape, target = layout(name, side)
    batches = [gradient(seed, shape, target, 3) for seed in range(BATCHES)]
    probe = lro.rank_probe(({"w": g} for g in batches), 0.95, metric, mode, targets={"w": target})
    matrices = np.stack([as_matrix(g, target, shape)[0] for g in batches])  # step, batch, m, n
    on_output = side == "output" or (side == "smaller" and matrices.shape[-2] > matrices.shape[-1])
    if mode == "pooled":
        sides = [np.concatenate(list(matrices), axis=-1)]  # (batch, m, steps * n)
        if side == "both":
            sides.append(np.concatenate(list(np.swapaxes(matrices, -1, -2)), axis=-1))
        elif on_output:
            sides = [np.concatenate(list(np.swapaxes(matrices, -1, -2)), axis=-1)]
        spectra = [np.linalg.svd(m, compute_uv=False) for m in sides]
    else:
        spectra = [np.linalg.svd(m, compute_uv=False) for m in matrices]
    ranks = [max(expected_rank(s, 0.95, metric) for s in spectrum) for spectrum in spectra]
    found = probe.leaves["w"]
    assert found.rank == max(ranks) == probe.ranks["w"]
    assert found.batches == BATCHES
    scaled = [s / s[..., :1] for s in spectra]
    want = scaled[int(np.argmax(ranks))] if mode == "pooled" else np.mean(scaled, axis=0)
    batch = found.leaf.view.batch_shape
    got = found.spectrum.reshape(want.shape[0], -1)[:, : want.shape[-1]]
    assert found.spectrum.shape[:-1] == batch
    np.testing.assert_allclose(got, want, atol=2e-3)


@hypothesis.given(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=8),
    st.floats(0.01, 1.0),
    st.sampled_from(METRICS),
)
def test_needed_rank_is_the_smallest_that_suffices(values, share, metric):
    spectrum = np.sort(np.asarray(values))[::-1]
    rank = int(needed_ranks(spectrum, share, metric))
    weights = spectrum ** (2 if metric == "energy" else 1)
    assert 1 <= rank <= len(values)
    assert weights[:rank].sum() >= share * weights.sum() * (1 - 1e-9)
    if rank > 1:
        assert weights[: rank - 1].sum() < share * weights.sum()


def test_pooled_counts_the_batches_directions_and_per_batch_does_not():
    """Each batch has rank 1, and all of them together rank 4."""
    batches = [{"w": jnp.outer(jnp.eye(6)[i], normal(i, (10,)))} for i in range(4)]
    targets = {"w": lro.Target()}
    assert lro.rank_probe(batches, 0.999, targets=targets).ranks == {"w": 4}
    assert lro.rank_probe(batches, 0.999, mode="per_batch", targets=targets).ranks == {"w": 1}


MODEL = {
    "embed": {"embedding": (40, 8)},
    "layers": {
        "norm": {"scale": (2, 8)},
        "attn": {"q": {"kernel": (2, 8, 8)}},
        "mlp": {"up": {"kernel": (2, 8, 24)}},
    },
    "lm_head": {"kernel": (8, 40)},
}


def model_gradients(seed):
    return fill(MODEL, seed)


def fill(shapes, seed):
    return {
        name: fill(entry, seed + i) if isinstance(entry, dict) else normal(seed + i, entry)
        for i, (name, entry) in enumerate(shapes.items())
    }


def test_default_targets_and_the_logra_table():
    batches = [model_gradients(i) for i in range(2)]
    assert list(lro.rank_probe(batches).leaves) == [
        "layers/attn/q/kernel",
        "layers/mlp/up/kernel",
    ]
    # The table's ranks exceed this model's sizes; a probe does not mind.
    probe = lro.rank_probe(batches, targets=lro.targets.logra())
    assert set(probe.leaves) == {
        "embed/embedding",
        "layers/attn/q/kernel",
        "layers/mlp/up/kernel",
        "lm_head/kernel",
    }
    for name in ("embed/embedding", "lm_head/kernel"):
        assert probe.leaves[name].spectrum.shape == (8,)  # the d side only
        assert probe.ranks[name] <= 8


def test_the_table_is_what_an_optimizer_takes():
    batches = [model_gradients(i) for i in range(2)]
    probe = lro.rank_probe(batches, 0.6, targets=lro.targets.logra())
    table = probe.targets(cap=0.75)
    params = model_gradients(7)
    plan = lro.refresh_basis(targets=table).init(params).plan
    ranks = {leaf.path: leaf.rank for leaf in plan.projections}
    assert ranks == {path: min(rank, 6) for path, rank in probe.ranks.items()}
    views = {leaf.path: (leaf.view, leaf.sides) for leaf in plan.projections}
    assert views == {path: (f.leaf.view, f.leaf.sides) for path, f in probe.leaves.items()}
    # One entry a path, which matches no other.
    table = lro.rank_probe([{"a.b": normal(0, (4, 6)), "axb": normal(1, (4, 6))}]).targets(cap=2)
    assert [pattern for pattern, _ in table] == [r"^a\.b$", "^axb$"]
    rounded = dict(probe.targets(multiple=4))
    assert all(target.rank % 4 == 0 for target in rounded.values())
    rest = probe.targets(others=lro.targets.default())
    assert rest[-1][1] is not None
    assert len(rest) == 5


def test_text(capsys):
    batches = [{"w": jnp.outer(jnp.ones(6), jnp.ones(10)), "b": jnp.ones(3)}]
    text = str(lro.rank_probe(batches, targets=[("w", 2)]))
    assert text.splitlines()[1].split() == ["w", "6x10", "1", "6", "17%", "1.0e+00"]
    assert "99.50% of the energy (Σσ²), pooled, over 1 batches" in text


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    probe = lro.rank_probe([model_gradients(i) for i in range(2)], targets=lro.targets.logra())
    figure = probe.plot(tmp_path / "decay.png")
    assert [panel.get_title() for panel in figure.axes] == ["attention", "mlp", "embedding", "head"]
    assert [len(panel.lines) for panel in figure.axes] == [3, 3, 2, 2]  # a line each, and a dot
    assert (tmp_path / "decay.png").stat().st_size > 0


def test_figure_without_matplotlib_says_what_to_install(monkeypatch):
    probe = lro.rank_probe([{"w": normal(0, (4, 6))}])
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"pip install 'lowrank-optax\[plot\]'"):
        probe.plot()


@pytest.mark.parametrize("unit", [1e-18, 1e18])
def test_scale_does_not_matter(unit):
    batches = [{"w": normal(i, (6, 10))} for i in range(3)]
    scaled = [{"w": b["w"] * unit} for b in batches]
    one, other = (lro.rank_probe(b, 0.9).leaves["w"] for b in (batches, scaled))
    assert one.rank == other.rank
    np.testing.assert_allclose(one.spectrum, other.spectrum, atol=1e-5)


def test_batches_without_a_usable_gradient_are_passed_over():
    good = {"w": normal(0, (6, 10), jnp.bfloat16), "dead": jnp.zeros((6, 10))}
    bad = {"w": jnp.full((6, 10), jnp.nan, jnp.bfloat16), "dead": jnp.zeros((6, 10))}
    probe = lro.rank_probe([bad, good, bad])
    alone = lro.rank_probe([good])
    assert probe.batches == 3
    assert probe.leaves["w"].batches == 1
    np.testing.assert_array_equal(probe.leaves["w"].spectrum, alone.leaves["w"].spectrum)
    assert (probe.ranks["dead"], probe.leaves["dead"].batches) == (1, 0)
    assert "no gradient" in str(probe)


def test_only_one_gradient_is_held_at_a_time():
    """What is kept is of the size of Gram matrices of the smaller side."""
    probe = lro.rank_probe(({"w": normal(i, (4, 5000))} for i in range(3)), 0.9)
    assert probe.leaves["w"].spectrum.shape == (4,)


def test_errors():
    one = {"w": normal(0, (4, 6))}
    with pytest.raises(ValueError, match="yielded no gradients; a generator can be consumed"):
        lro.rank_probe(iter([]))
    with pytest.raises(TypeError, match=r"got a single tree; pass \[grads\]"):
        unchecked(lro.rank_probe)(one)
    with pytest.raises(ValueError, match="'energi' is not one of 'energy', 'nuclear'"):
        lro.rank_probe([one], metric="energi")
    with pytest.raises(ValueError, match="'batch' is not one of 'pooled', 'per_batch'"):
        lro.rank_probe([one], mode="batch")
    with pytest.raises(ValueError, match=r"energy=99.5 is a share, in \(0, 1\]"):
        lro.rank_probe([one], 99.5)
    with pytest.raises(ValueError, match=r"batch 1 have another structure .* at 'v'"):
        lro.rank_probe([one, {"v": one["w"]}])
    with pytest.raises(ValueError, match=r"'w': got shape \(5, 6\) in batch 1, expected \(4, 6\)"):
        lro.rank_probe([one, {"w": normal(0, (5, 6))}])
    with pytest.raises(ValueError, match="'w': got a compact gradient"):
        lro.rank_probe([one, {"w": lro.Compact(jnp.ones((2, 6)))}])
    with (
        pytest.warns(UserWarning, match="no leaf is projected"),
        pytest.raises(ValueError, match="none of these leaves has a matrix to probe"),
    ):
        lro.rank_probe([{"bias": jnp.ones(3)}])
    with pytest.raises(ValueError, match="targets matches no matrix"):
        lro.rank_probe([one], targets=[("mlpp", 3)])
    with pytest.raises(TypeError, match="must be a pair"):
        lro.rank_probe([one], targets=["w"])
    with pytest.raises(ValueError, match=r"cap=1\.5"):
        lro.rank_probe([one]).targets(cap=1.5)


def test_it_takes_real_gradients_from_a_generator():
    """A regression with inputs in a plane has gradients of rank 2, in float32."""
    import jax

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    plane = normal(0, (2, 12))
    params = {"w": normal(1, (12, 20))}
    grads = (jax.grad(loss)(params, normal(2 + i, (16, 2)) @ plane) for i in range(5))
    probe = lro.rank_probe(grads, 1.0 - 1e-5)
    assert probe.ranks == {"w": 2}
    tx = lro.galore_project(optax.sgd(0.1), lro.refresh_basis(targets=probe.targets()))
    assert tx.init(params).tracker_state.reduction_basis["w"].shape == (12, 2)
