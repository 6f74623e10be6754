"""The code that the README shows runs as it is printed."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import lowrank_optax as lro
from tests.markdown import python_blocks, run

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = python_blocks(README)


@pytest.fixture
def names():
    """What the README's reader has at hand: a model, data, a schedule."""
    params = {
        "mlp": {"up": jnp.ones((8, 160)), "down": jnp.ones((160, 136))},
        "router": {"kernel": jnp.ones((136, 140))},
    }

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch @ params["mlp"]["up"]) @ params["mlp"]["down"]
        return jnp.mean(jnp.square(hidden @ params["router"]["kernel"]))

    batch = jax.random.normal(jax.random.key(0), (4, 8))
    return {
        "jax": jax,
        "optax": optax,
        "lro": lro,
        "params": params,
        "loss_fn": loss_fn,
        "batch": batch,
        "first": batch,
        "second": -batch,
        "schedule": optax.constant_schedule(1e-3),
    }


def test_blocks_run_in_order(names):
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        if "grad_fn(params, first" in block.code:
            names["opt_state"] = names["tx"].init(names["params"])
        run(block, names, "README.md")
    with jax.numpy_dtype_promotion("standard"):
        # The optimizer of the last block, the step of the third and the sum of the fourth.
        state = names["tx"].init(names["params"])
        params, state, loss = names["train_step"](names["params"], state, names["batch"])
        assert jnp.isfinite(loss)
        assert not jnp.allclose(params["router"]["kernel"], 1.0)
        assert isinstance(names["grads"]["mlp"]["down"], lro.Compact)


def test_the_table_of_targets_does_what_its_comments_say(names):
    (block,) = [block for block in BLOCKS if "targets.default()" in block.code]
    names["params"]["conv"] = {"kernel": jnp.ones((3, 3, 16, 64))}
    run(block, names)
    plan = names["tracker"].init(names["params"]).plan
    ranks = {leaf.path: leaf.rank for leaf in plan.leaves}
    assert ranks == {
        "conv/kernel": 32,
        "mlp/down": 64,
        "mlp/up": 0,  # its smaller side is below the rank
        "router/kernel": 0,
    }


def test_set_up_commands_name_what_exists():
    root = pathlib.Path(__file__).parents[2]
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    for script in re.findall(r"python (\S+\.py)", commands):
        assert (root / script).exists()
    extras = re.findall(r"\.\[(\w+)\]", commands)
    assert extras == ["examples", "tests"]
    assert all(f"\n{extra} = [" in (root / "pyproject.toml").read_text() for extra in extras)
