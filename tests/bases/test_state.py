import jax.numpy as jnp
import optax
import pytest

import lowrank_optax as lro
from lowrank_optax import Bases, Target
from lowrank_optax._bases.state import start_state
from lowrank_optax._plan.make_plan import make_plan

PARAMS = {"a": jnp.zeros((16, 24)), "b": jnp.zeros((16, 24)), "n": jnp.zeros(3)}


def test_bases_are_paired_by_path():
    plan = make_plan(PARAMS, [("a", Target(4, side="both")), ("b", 4)], 4, "smaller")
    mask = optax.MaskedNode()
    reduction = {"a": jnp.ones((16, 4)), "b": jnp.full((16, 4), 2.0), "n": mask}
    output = {"a": jnp.full((24, 4), 3.0), "b": mask, "n": mask}
    state = start_state(plan, PARAMS, [Bases()] * 2)
    both, one = state._replace(reduction_basis=reduction, output_basis=output).encoders()
    assert isinstance(both, Bases)
    assert (float(both.reduction[0, 0]), float(both.output[0, 0])) == (1, 3)
    assert float(one.reduction[0, 0]) == 2
    assert one.output is None


def test_bases_of_another_rank_are_an_error_that_says_what_to_do():
    state = lro.refresh_basis(4, targets=[("a", 4)]).init(PARAMS)
    other = lro.refresh_basis(3, targets=[("a", 3)]).init(PARAMS)
    with pytest.raises(ValueError, match=r"'a': the state has a basis .* \(16, 3\).*lro\.migrate"):
        state._replace(reduction_basis=other.reduction_basis).encoders()


def test_bases_are_replaced_by_path():
    state = lro.refresh_basis(4, targets=[("a", 4), ("b", 4)]).init(PARAMS)
    new = state.with_bases([Bases(jnp.ones((16, 4))), Bases(jnp.full((16, 4), 2.0))])
    assert float(new.reduction_basis["a"][0, 0]) == 1
    assert float(new.reduction_basis["b"][0, 0]) == 2
    assert isinstance(new.output_basis["a"], optax.MaskedNode)
