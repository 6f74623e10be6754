"""The loop around the iterations: stages, monitor, scores and checkpoints."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowrank_optax as lro
from model.decoder import Params
from reinforcement.guard import Learner, start_guard
from reinforcement.learning import Iteration, State
from reinforcement.optimizers import Stages
from reinforcement.reporting import Result
from running.errors import Interruption
from running.training import Observer, StopRequest, count_bytes

GOOD_REWARD = 0.9
"""What the number of iterations is counted to."""

MakeOptimizer = Callable[[tuple[str, ...]], optax.GradientTransformationExtraArgs]
"""From the classes that are projected to the optimizer."""


class Run(NamedTuple):
    """What a checkpoint holds: the state, and the iteration that first earned `GOOD_REWARD`."""

    state: State
    reached: jax.Array


def start_run(params: Params, tx: optax.GradientTransformation, kl_weight: float) -> Run:
    """The state before the first iteration. The parameters are copied."""

    @jax.jit  # so that no two leaves share memory: the iterations donate it
    def start(params: Params) -> Run:
        one = jnp.ones([], jnp.float32)
        learner = Learner(params, tx.init(params), one, jnp.asarray(kl_weight, jnp.float32))
        return Run(State(learner, start_guard(learner)), jnp.zeros([], jnp.int32))

    return start(params)


def change_stage(
    state: State, old_tx: optax.GradientTransformation, new_tx: optax.GradientTransformation
) -> State:
    """Carries both optimizer states over: the one in use, and the one that the guard keeps."""

    def carry(opt_state: Any, params: Params) -> Any:
        moved = lro.migrate(opt_state, old_tx, new_tx, params)
        return jax.tree.map(jnp.copy, moved)  # what did not change is shared, and will be donated

    learner, guard = state.learner, state.guard
    return State(
        learner._replace(opt_state=carry(learner.opt_state, learner.params)),
        guard._replace(opt_state=carry(guard.opt_state, guard.params)),
    )


def learn(
    run: Run,
    start: int,
    *,
    iterations: int,
    stages: Stages,
    make_optimizer: MakeOptimizer,
    make_iteration: Callable[[optax.GradientTransformationExtraArgs], Iteration],
    reference: Params,
    score: Callable[[Params, jax.Array], float],
    seed: int,
    eval_every: int,
    save_every: int,
    observer: Observer,
    monitor: Callable[[int, Any], None] | None = None,
    save: Callable[[int, Run], None] | None = None,
) -> Result:
    """Runs the iterations ``start … iterations``.

    What happens in an iteration depends on the seed, its number and the state alone.

    Args:
        run: from `start_run` or a checkpoint; donated.
        start: how many iterations it has seen.
        iterations: in all.
        stages: what is projected when.
        make_optimizer: called at every change of stage.
        make_iteration: likewise.
        reference: parameters that the policy should stay close to.
        score: measures parameters on held-out prompts.
        seed: of prompts and samples.
        eval_every: iterations between two scores; there is one at the end in any case.
        save_every: iterations between two checkpoints, likewise.
        observer: told about every iteration.
        monitor: called with the number of iterations and the optimizer's state.
        save: called with the number of iterations and the run.

    Returns:
        The `Result`.

    Raises:
        Interruption: after Ctrl-C, once the state has been saved.
    """
    key = jax.random.key(seed)
    scored, sampled = jax.random.split(key)
    before = score(reference, scored)
    after = None
    seconds: list[float] = []
    stage = stages.at(max(start - 1, 0))
    tx = make_optimizer(stage)
    iteration, compiled = make_iteration(tx), False
    state, reached = run
    with StopRequest() as stop:
        for number in range(start, iterations):
            if stages.at(number) != stage:
                stage, old_tx = stages.at(number), tx
                tx = make_optimizer(stage)
                state = change_stage(state, old_tx, tx)
                iteration, compiled = make_iteration(tx), False
            began = time.perf_counter()
            state, measured = iteration(state, reference, jax.random.fold_in(sampled, number))
            metrics = {name: float(value) for name, value in measured.items()}  # waits for them
            elapsed = time.perf_counter() - began
            if compiled:
                seconds.append(elapsed)
            compiled = True
            done = number + 1
            last = done == iterations
            if reached == 0 and metrics["reward"] >= GOOD_REWARD:
                reached = jnp.asarray(done, jnp.int32)
            if monitor is not None:
                monitor(done, state.learner.opt_state)
            if last or done % eval_every == 0:
                after = metrics["score"] = score(state.learner.params, scored)
            observer.step(done, metrics | {"seconds": elapsed})
            if save and (last or stop.requested or done % save_every == 0):
                save(done, Run(state, reached))
            if stop.requested and not last:
                kept = "checkpoint saved, go on with --resume" if save else "nothing was saved"
                raise Interruption(f"interrupted after iteration {done} of {iterations}; {kept}")
    if after is None:  # resumed at the end
        after = score(state.learner.params, scored)
    return Result(
        before=before,
        after=after,
        reached=int(reached) or None,
        restores=int(state.guard.restores),
        state_bytes=count_bytes(state.learner.opt_state),
        seconds=statistics.median(seconds) if seconds else None,
    )
