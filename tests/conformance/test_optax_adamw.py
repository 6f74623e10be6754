"""``optax.adamw`` itself, to the bit where the subspace is the whole space."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowrank_optax as lro

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.02, 50, 400, 0.001)


def decayed(tree):
    """The usual mask: matrices decay, biases do not."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


ADAMWS = {
    "plain": lambda: optax.adamw(0.01),
    "decay": lambda: optax.adamw(0.01, weight_decay=0.3),
    "schedule": lambda: optax.adamw(SCHEDULE, weight_decay=0.3),
    "mask": lambda: optax.adamw(SCHEDULE, weight_decay=0.3, mask=decayed),
    "mask_tree": lambda: optax.adamw(
        0.01, weight_decay=0.3, mask={"tall": True, "wide": False, "square": True, "bias": False}
    ),
    "bf16_mu": lambda: optax.adamw(0.01, weight_decay=0.3, mu_dtype=jnp.bfloat16),
    "nesterov": lambda: optax.adamw(SCHEDULE, nesterov=True, eps=1e-3, eps_root=1e-6),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE, weight_decay=0.1)
    ),
}


@pytest.fixture(params=["float32", "bfloat16"])
def problem(request, gradients):
    """Params and 450 gradients for them, in one dtype."""
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(request.param)
    grads = gradients | {"bias": gradients["wide"][:, 2]}
    start = {name: rng.standard_normal(x.shape[1:]) for name, x in grads.items()}
    cast = lambda tree: {name: x.astype(dtype) for name, x in tree.items()}  # noqa: E731
    return cast(start), cast(grads)


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    for name, expected in theirs.params.items():
        assert ours.params[name].dtype == expected.dtype
        np.testing.assert_array_equal(
            ours.params[name].view(np.uint8), expected.view(np.uint8), err_msg=name
        )


# A rank that reaches the smaller side, whatever it is written as.
@pytest.mark.parametrize(
    ("name", "rank"), [*((name, 1.0) for name in ADAMWS), ("mask", 24), ("mask", 1000)]
)
def test_full_rank_targets_train_to_the_bit(name, rank, problem, run):
    """P = I: the optimizer inside is as it is outside."""
    start, grads = problem
    tracker = lro.refresh_basis(rank, 200, targets=[("tall|wide|square", rank)])
    tx = lro.galore_project(ADAMWS[name](), tracker)
    assert [row.note[:5] for row in lro.describe(tx, start).rows].count("P = I") == 3
    ours, theirs = run(tx, start, grads), run(ADAMWS[name](), start, grads)
    assert not ours.bases
    assert_same_bits(ours, theirs)


def test_default_targets_below_the_rank_train_to_the_bit(problem, run):
    """Without targets, nothing here exceeds the rank: AdamW, and a warning that says so."""
    start, grads = problem
    tx = lro.galore_project(ADAMWS["mask"](), lro.refresh_basis(rank=64))
    with pytest.warns(UserWarning, match="no leaf is projected"):
        ours = run(tx, start, grads)
    assert_same_bits(ours, run(ADAMWS["mask"](), start, grads))


def test_leaves_that_are_no_target_train_to_the_bit(problem, run):
    """Beside a projected leaf, the others still are AdamW's, decay and schedule included."""
    start, grads = problem
    tracker = lro.refresh_basis(4, 200, targets=[("wide", 4)])
    ours = run(lro.galore_project(ADAMWS["mask"](), tracker, scale=0.25), start, grads)
    theirs = run(ADAMWS["mask"](), start, grads)
    assert list(ours.bases) == ["wide"]
    assert np.any(ours.params.pop("wide") != theirs.params.pop("wide"))
    assert_same_bits(ours, theirs)


def test_decay_inside_is_decay_outside(gradients, run, deviation):
    """``galore_project(adamw)`` is projected Adam, then decay of the weight, then the rate.

    The scale is on the projected update alone: it scales neither the decay nor the bias.
    """
    rng = np.random.default_rng(5)
    grads = gradients | {"bias": gradients["tall"][:, 1]}
    start = {k: rng.standard_normal(x.shape[1:]).astype(np.float32) for k, x in grads.items()}
    tracker = lambda: lro.refresh_basis(4, 200)  # noqa: E731
    adamw = optax.adamw(SCHEDULE, weight_decay=0.5, mask=decayed)
    inside = lro.galore_project(adamw, tracker(), scale=0.25)
    outside = optax.chain(
        lro.galore_project(optax.scale_by_adam(), tracker(), scale=0.25),
        optax.add_decayed_weights(0.5, mask=decayed),
        optax.scale_by_learning_rate(SCHEDULE),
    )
    no_decay = lro.galore_project(optax.adam(SCHEDULE), tracker(), scale=0.25)
    ours, theirs, bare = (run(tx, start, grads) for tx in (inside, outside, no_decay))
    assert set(ours.bases) == {"tall", "wide", "square"}
    for name in start:
        assert deviation(ours.params[name], theirs.params[name]) < 2e-6, name
        if name != "bias":
            assert deviation(bare.params[name], theirs.params[name]) > 0.1, name
