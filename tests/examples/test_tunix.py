"""Our transformations as the optimizers of tunix's trainers."""

import dataclasses
import io
import pathlib
import warnings

import flax
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import lowrank_optax as lro
from tests import markdown
from tests.helpers.assertions import as_matrix

EAGER = flax.config.flax_always_shard_variable
with warnings.catch_warnings():
    # What tunix and its dependencies import.
    warnings.simplefilter("ignore", DeprecationWarning)
    tunix = pytest.importorskip("tunix", reason="the tunix extra")
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3

    import tunix_training
# Importing it changes how Flax makes variables, which is not for the other tests.
flax.config.update("flax_always_shard_variable", EAGER)

# What tunix 0.1.7 uses that JAX, Flax and optax have deprecated.
DEPRECATED = (
    ".with mesh.. context manager",
    "jax.interpreters.pxla.thread_resources is deprecated",
    "'sharding' is deprecated, use 'out_sharding'",
    "'.value' access is now deprecated",
    "optax.global_norm is deprecated",
)
pytestmark = [
    pytest.mark.tunix,
    pytest.mark.usefixtures("as_tunix_wants", "compile_once"),
    *(pytest.mark.filterwarnings(f"ignore:{text}:DeprecationWarning") for text in DEPRECATED),
]

MODEL = dataclasses.replace(
    tunix_training.MODEL, num_layers=1, embed_dim=32, hidden_dim=64, head_dim=8
)


@pytest.fixture(scope="module")
def as_tunix_wants():
    """Global settings: GRPO samples in a thread of its own, which a context does not reach."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    flax.config.update("flax_always_shard_variable", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tunix_training, "MODEL", MODEL)
        yield
    flax.config.update("flax_always_shard_variable", EAGER)
    jax.config.update("jax_numpy_dtype_promotion", before)


def run(*argv):
    """What the example returns for its command line, and what it prints."""
    args = tunix_training.make_parser().parse_args([*argv, "--seed", "1"])
    console = Console(file=io.StringIO(), width=200)
    return tunix_training.run(args, console), console.file.getvalue()


SFT = ("--steps", "3", "--batch-size", "4", "--seq-len", "15")
GRPO = ("--trainer", "grpo", "--batch-size", "4", "--generations", "4")
MESH = ("--mesh", "fsdp=4,tp=2", "--accumulate", "2")


@pytest.fixture(scope="module")
def sft():
    return run("--optimizer", "galore", *SFT)[0]["galore"]


def flat(tree):
    """Leaves of a state or of params by path."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.as_pure(tree))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def moved(result):
    """By how much training moved each weight, from where the example starts."""
    start = flat(nnx.state(tunix_training.make_model(1), nnx.Param))
    after = flat(nnx.state(result.trainer.model, nnx.Param))
    return {path: np.asarray(after[path], np.float64) - start[path] for path in start}


def assert_low_rank(result, state):
    """That the state is ours and small, and that updates were made of its bases alone."""
    assert isinstance(state, lro.SubspaceState)
    assert isinstance(state.tracker_state, lro.TrackerState)
    tracker, adam = state.tracker_state, state.inner_state[0]
    bases = flat(tracker.reduction_basis) | flat(tracker.output_basis)
    moves = moved(result)
    targets = tracker.plan.projections
    assert [leaf.path.split("/")[-2] for leaf in targets] == [
        *(f"{name}_proj" for name in ("k", "o", "q", "v")),
        *(f"{name}_proj" for name in ("down", "gate", "up")),
    ]
    for leaf in targets:
        (side,) = leaf.sides
        basis = np.asarray(bases[leaf.path], np.float64)
        basis = basis.reshape(-1, leaf.rank)
        view = lro.Target(leaf.rank, leaf.view.reduction_axes, leaf.view.output_axes)
        (move,) = as_matrix(moves[leaf.path], view, leaf.shape)[0]
        move = move if side == "reduction" else move.T
        assert np.linalg.norm(move) > 1e-4
        assert len(basis) == len(move) == min(move.shape) == 4 * leaf.rank
        outside = move - basis @ (basis.T @ move)
        assert np.linalg.norm(outside) < 1e-3 * np.linalg.norm(move)
        for moments in (adam.mu, adam.nu):
            assert flat(moments)[leaf.path].size == leaf.rank * max(move.shape)


def test_sft(sft):
    assert sft.history.shape == (3,)
    assert np.all(np.isfinite(sft.history))
    assert sft.history[-1] < sft.history[0]
    assert_low_rank(sft, sft.opt_state)
    assert int(sft.opt_state.tracker_state.tracker_count) == 3
    params = nnx.state(sft.trainer.model, nnx.Param)
    adamw = sum(x.nbytes for x in jax.tree.leaves(optax.adamw(1.0).init(params)))
    vocabulary = 2 * 2 * 4 * MODEL.vocab_size * MODEL.embed_dim  # not projected
    assert sft.state_bytes == lro.describe(sft.trainer.optimizer.tx, params).state_bytes
    assert sft.state_bytes - vocabulary < 0.4 * (adamw - vocabulary)


def test_sft_on_a_mesh(sft):
    """In two micro-batches, too: tunix wraps the optimizer for that."""
    results, table = run("--optimizer", "galore", *SFT, *MESH)
    result = results["galore"]
    assert "galore" in table
    np.testing.assert_allclose(result.history, sft.history, rtol=1e-4)
    assert isinstance(result.opt_state, optax.MultiStepsState)
    state = result.opt_state.inner_opt_state
    assert_low_rank(result, state)
    assert int(state.tracker_state.tracker_count) == 3
    for tree in (state.tracker_state.reduction_basis, state.inner_state[0].mu):
        for path, x in flat(tree).items():
            shard = x.addressable_shards[0].data
            if x.ndim > 1:
                assert 8 * shard.size == x.size, path
    assert 7 * result.device_bytes < result.state_bytes


FAMILIES = {
    "gemma": lambda: gemma.Gemma(
        gemma.ModelConfig(
            **SHAPE,
            num_embed=300,
            final_logit_softcap=None,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(gemma.AttentionType.GLOBAL,),
        ),
        rngs=nnx.Rngs(0),
    ),
    "gemma3": lambda: gemma3.Gemma3(
        gemma3.ModelConfig(**SHAPE, num_embed=300, sliding_window_size=8), rngs=nnx.Rngs(0)
    ),
    "gemma4": lambda: gemma4.Gemma4(
        gemma4.ModelConfig(**SHAPE, num_embed=300, global_key_size=16), rngs=nnx.Rngs(0)
    ),
    "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**SHAPE, **WIDE), rngs=nnx.Rngs(0)),
    "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**SHAPE, **WIDE), rngs=nnx.Rngs(0)),
    "qwen3_experts": lambda: qwen3.Qwen3(
        qwen3.ModelConfig(**SHAPE, **WIDE, num_experts=3, num_experts_per_tok=2),
        rngs=nnx.Rngs(0),
    ),
}
SHAPE = {
    "num_layers": 1,
    "embed_dim": 40,
    "hidden_dim": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
}
WIDE = {"vocab_size": 300, "rope_theta": 10_000, "norm_eps": 1e-6}


def axes_of_the_einsum(module):
    """Which axes of a layer's weight are summed over, by the layer's own einsum."""
    operands, result = module.einsum_str.split("->")
    weight = operands.split(",")[1]
    return tuple(i for i, letter in enumerate(weight) if letter not in result)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_every_family_are_found(family):
    model = nnx.eval_shape(FAMILIES[family])
    params = nnx.state(model, nnx.Param)
    plan = lro.galore_adamw(1e-2, rank=8).init(params).tracker_state.plan
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    found = {path: leaf for path, leaf in leaves.items() if leaf.sides}
    checked = set()
    for path, module in nnx.iter_graph(model):
        path = "/".join(map(str, path))
        if hasattr(module, "einsum_str") and path not in ("lm_head",):
            view = found[f"{path}/w"].view
            assert view.reduction_axes == axes_of_the_einsum(module)
            assert view.batch_axes == ()
            checked.add(f"{path}/w")
        elif isinstance(module, nnx.Linear) and "router" not in path:
            assert found[f"{path}/kernel"].view.reduction_axes == (0,)
            checked.add(f"{path}/kernel")
    experts = {path for path in found if path.endswith("_proj")}
    assert len(experts) == (3 if family == "qwen3_experts" else 0)
    assert all(found[path].view.batch_axes == (0,) for path in experts)
    assert set(found) == checked | experts
    assert len(checked) >= 4
    assert "embedder/input_embedding" in leaves


@pytest.mark.parametrize(
    ("optimizer", "options"), [("logra", ("--steps", "12")), ("galore", ("--steps", "12", *MESH))]
)
def test_grpo(optimizer, options):
    results, _ = run("--optimizer", optimizer, *GRPO, *options)
    result = results[optimizer]
    steps = int(options[1])
    assert result.history.shape == (steps,)
    assert np.all((result.history >= 0) & (result.history <= 1))
    losses = result.trainer.metrics_logger.get_metric_history("actor", "loss", "train")
    assert len(losses) == steps
    assert np.all(np.isfinite(losses))
    # The sampler sees the weights that were trained.
    assert result.history[-1] > 1.5 * result.history[0]
    state = getattr(result.opt_state, "inner_opt_state", result.opt_state)
    assert int(state.tracker_state.tracker_count) == steps
    if optimizer == "galore":
        assert_low_rank(result, state)
    else:
        # Learned bases turn at every step, so the sum of all steps leaves the last one.
        for basis in flat(state.tracker_state.reduction_basis).values():
            columns = np.asarray(basis, np.float64).reshape(-1, basis.shape[-1])
            np.testing.assert_allclose(columns.T @ columns, np.eye(basis.shape[-1]), atol=1e-4)


def test_the_code_of_the_page():
    blocks = markdown.python_blocks(
        (pathlib.Path(__file__).parents[2] / "docs/tunix.md").read_text()
    )
    assert len(blocks) == 3
    args = tunix_training.make_parser().parse_args(SFT)
    names = {
        **{"tunix": tunix, "optax": optax, "lro": lro, "nnx": nnx},
        "model": tunix_training.make_model(0),
        "model_input": tunix_training.model_input,
        "place_state": tunix_training.place_state,
        "batches": tunix_training.batches(args),
    }
    for block in blocks:
        markdown.run(block, names, "tunix.md")
    assert names["trainer"].train_steps == 3
    assert isinstance(nnx.as_pure(names["trainer"].optimizer.opt_state)[1], lro.SubspaceState)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--mesh", "data=8"), "--mesh needs the axes that tunix's models name"),
        (("--batch-size", "8", "--accumulate", "3"), "--batch-size 8 does not divide into"),
        (("--trainer", "grpo", "--generations", "1"), "--generations 1 leaves nothing"),
    ],
)
def test_options_that_cannot_be_meant(argv, message, capsys):
    assert tunix_training.main(argv) == 2
    assert message in capsys.readouterr().err
