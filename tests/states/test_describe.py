"""What ``describe`` says is what ``tx.init`` makes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import lowrank_optax as lro

PARAMS = {
    "embed": {"embedding": jnp.zeros((96, 16))},
    "layers": {
        "norm": {"scale": jnp.zeros((3, 16))},
        "q": {"kernel": jnp.zeros((3, 16, 2, 8)), "bias": jnp.zeros((3, 2, 8))},
        "up": {"kernel": jnp.zeros((3, 16, 40), jnp.bfloat16)},
    },
    "small": {"kernel": jnp.zeros((16, 4))},
}
TRACKER = {"rank": 8, "targets": [("kernel", 8)]}


def project(inner=None, **options):
    return lro.galore_project(inner, lro.refresh_basis(**{**TRACKER, **options}))


def labels(params):
    return jax.tree.map(lambda x: "low" if x.ndim > 2 else "full", params)


def mask(params):
    return jax.tree.map(lambda x: x.ndim > 2, params)


OPTIMIZERS = {
    "adamw alone": optax.adamw(1e-3),
    "galore_adamw": lro.galore_adamw(1e-3, rank=8),
    "float rank": lro.galore_adamw(1e-3, rank=0.5),
    "sgd": project(optax.sgd(1e-3)),
    "momentum": project(optax.sgd(1e-3, momentum=0.9)),
    "lion": project(optax.lion(1e-3)),
    "adafactor": project(optax.adafactor(1e-3)),
    "adafactor factored": project(optax.adafactor(1e-3, min_dim_size_to_factor=8)),
    "adan": project(optax.adan(1e-3)),
    "both sides": project(optax.adam(1e-3), side="both"),
    "bfloat16 bases": project(optax.adam(1e-3, mu_dtype=jnp.bfloat16), dtype=jnp.bfloat16),
    "schedule": project(optax.adamw(optax.linear_schedule(1.0, 0.0, 10))),
    "metrics": lro.galore_adamw(1e-3, rank=8, metrics=True),
    "filter in a chain": optax.chain(project(), optax.adam(1e-3)),
    "tracker alone": optax.chain(lro.refresh_basis(**TRACKER), optax.adam(1e-3)),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), project(optax.adam(1e-3)), optax.ema(0.9)),
    "partition": optax.partition({"low": project(optax.adam(1e-3)), "full": optax.sgd(1)}, labels),
    "masked": optax.masked(project(optax.adam(1e-3)), mask),
    "MultiSteps": optax.MultiSteps(project(optax.adam(1e-3)), 4).gradient_transformation(),
    "inject": optax.inject_hyperparams(
        lro.galore_adamw, static_args=("rank", "refresh_every", "method", "side", "seed")
    )(1e-3, rank=8),
    "schedule_free": optax.contrib.schedule_free(project(optax.sgd(1e-3)), 1e-3),
    "apply_if_finite": optax.apply_if_finite(project(optax.adam(1e-3)), 3),
    "noise, with a key": optax.chain(project(optax.adam(1e-3)), optax.add_noise(0.1, 0.5, 0)),
}


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.filterwarnings("ignore:.*Lion:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes_are_those_of_the_state(name):
    tx = OPTIMIZERS[name]
    with jax.numpy_dtype_promotion("standard"):
        described = lro.describe(tx, PARAMS)
        state = jax.eval_shape(tx.init, PARAMS)
    assert described.state_bytes == nbytes(state)
    assert described.adamw_bytes == nbytes(jax.eval_shape(optax.adamw(1.0).init, PARAMS))
    assert [row.path for row in described.rows] == [
        "embed/embedding",
        "layers/norm/scale",
        "layers/q/bias",
        "layers/q/kernel",
        "layers/up/kernel",
        "small/kernel",
    ]
    assert all(
        row.adamw_bytes == 2 * nbytes(p)
        for row, p in zip(described.rows, jax.tree.leaves(PARAMS), strict=True)
    )
    if name != "adamw alone":
        assert any(row.rank for row in described.rows)


def test_a_real_state():
    tx = lro.galore_adamw(1e-3, rank=8)
    assert lro.describe(tx, PARAMS).state_bytes == sum(
        x.nbytes for x in jax.tree.leaves(tx.init(PARAMS))
    )


@pytest.mark.parametrize("name", ["galore_adamw", "partition", "masked", "MultiSteps", "chain"])
def test_abstract_params(name):
    tx = OPTIMIZERS[name]
    assert lro.describe(tx, jax.eval_shape(lambda: PARAMS)) == lro.describe(tx, PARAMS)


def test_nothing_is_allocated():
    huge = {"kernel": jax.ShapeDtypeStruct((1 << 20, 1 << 21), jnp.float32)}
    described = lro.describe(lro.galore_adamw(1e-3, rank=128), huge)
    assert described.adamw_bytes > 1e13
    assert described.state_bytes < 0.001 * described.adamw_bytes


def test_bytes_belong_to_their_leaves():
    rows = {row.path: row for row in lro.describe(project(optax.adam(1e-3)), PARAMS).rows}
    # Basis (3, 16, 8) and two moments (3, 8, 16) for q; no basis for what has no target.
    assert rows["layers/q/kernel"].state_bytes == 4 * (3 * 16 * 8 + 2 * 3 * 8 * 16)
    assert rows["layers/up/kernel"].state_bytes == 4 * (3 * 16 * 8 + 2 * 3 * 8 * 40)
    assert rows["layers/norm/scale"].state_bytes == 2 * 4 * 3 * 16
    assert rows["embed/embedding"].state_bytes == 2 * 4 * 96 * 16


def test_rows():
    rows = {row.path: row for row in lro.describe(project(optax.adam(1e-3)), PARAMS).rows}
    query = rows["layers/q/kernel"]
    assert (query.view, query.side, query.rank) == ("3 x 16x16", "reduction", 8)
    assert (query.shape, query.dtype, query.note) == ((3, 16, 2, 8), "float32", "")
    small = rows["small/kernel"]
    assert (small.view, small.side, small.rank) == ("16x4", "", 0)
    assert small.note == "P = I: the rank is the full rank"
    assert rows["layers/up/kernel"].dtype == "bfloat16"
    assert (rows["embed/embedding"].view, rows["embed/embedding"].rank) == ("", 0)
    both = lro.describe(project(optax.adam(1e-3), side="both"), PARAMS)
    assert {row.side for row in both.rows} == {"", "both"}


TABLE = """\
leaf               shape                   view       side       rank  state     adamw
embed/embedding    float32[96, 16]                               full  12.29 kB  12.29 kB
layers/norm/scale  float32[3, 16]                                full  384 B     384 B
layers/q/bias      float32[3, 2, 8]                              full  384 B     384 B
layers/q/kernel    float32[3, 16, 2, 8]    3 x 16x16  reduction  8     4.61 kB   6.14 kB
layers/up/kernel   bfloat16[3, 16, 40]     3 x 16x40  reduction  8     9.22 kB   7.68 kB
small/kernel       float32[16, 4]          16x4                  full  512 B     512 B     \
P = I: the rank is the full rank
total                                                                  27.42 kB  27.40 kB  \
100.1% of AdamW's"""


def test_table():
    described = lro.describe(project(optax.adam(1e-3)), PARAMS)
    lines = [" ".join(line.split()) for line in str(described).splitlines()]
    assert lines == [" ".join(line.split()) for line in TABLE.splitlines()]
    # Columns stand under each other.
    printed = str(described).splitlines()
    column = printed[0].index("rank")
    assert [line[column : column + 4].strip() for line in printed[1:-1]] == [
        "full",
        "full",
        "full",
        "8",
        "8",
        "full",
    ]
    assert all(line == line.rstrip() for line in printed)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_500_000, "1.50 MB"),
        (82_400_000_000, "82.40 GB"),
        (5 * 10**15, "5000.00 TB"),
    ],
)
def test_sizes_for_people(size, text):
    params = {"kernel": jax.ShapeDtypeStruct((size,), jnp.int8)}
    tx = optax.GradientTransformation(lambda params: params, lambda u, s, p: (u, s))
    assert f"  {text}  " in str(lro.describe(tx, params)).splitlines()[1] + "  "


def test_notes():
    assert lro.describe(project(optax.adam(1e-3)), PARAMS).notes == ()
    (note,) = lro.describe(project(optax.adafactor(1e-3, min_dim_size_to_factor=8)), PARAMS).notes
    assert note.startswith("note: FactoredState.v_row, FactoredState.v_col: not recognised as mom")
    filtering = lro.describe(optax.chain(project(), optax.adam(1e-3)), PARAMS)
    (note,) = filtering.notes
    assert note.startswith("note: without an inner optimizer this is a filter: what follows it")
    assert str(filtering).endswith(note)
    assert lro.describe(optax.adamw(1e-3), PARAMS).notes == ()


def test_boxed_and_missing_leaves():
    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    params = {"linear": nnx.state(model, nnx.Param), "gone": None}
    described = lro.describe(lro.galore_adamw(1e-3, rank=8), params)
    assert [row.path for row in described.rows] == ["linear/bias", "linear/kernel"]
    state = lro.galore_adamw(1e-3, rank=8).init(params)
    assert described.state_bytes == sum(x.nbytes for x in jax.tree.leaves(state))


def test_params_named_like_state_fields():
    """What belongs to whom may be unclear then, but not the sum."""
    params = {
        "mu": {"kernel": jnp.zeros((16, 24))},
        "kernel": jnp.zeros((16, 40)),
        "count": jnp.zeros(3),
    }
    tx = project(optax.adam(1e-3))
    assert lro.describe(tx, params).state_bytes == nbytes(jax.eval_shape(tx.init, params))
