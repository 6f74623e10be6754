"""Checkpoints of one run: a ``config.json``, and one Orbax directory for each saved step.

A run that is resumed goes on bit by bit as if it had not stopped, or it does not start: the
configuration that decides what is computed is kept beside the arrays and compared.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

import lowrank_optax as lro
from running.errors import UserError, one_line


class Checkpoints:
    """The checkpoints below one directory.

    Nothing is written before the first `save`.

    Args:
        directory: of this run alone.
        config: JSON values, by name, that must be the same when the run is resumed.
    """

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Any]):
        self.directory = directory.absolute()
        self.config = json.loads(json.dumps(config))
        self._manager: ocp.CheckpointManager | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """The last step that was saved completely, if any."""
        if not self.directory.is_dir():
            return None
        steps = [int(path.name) for path in self.directory.iterdir() if path.name.isdigit()]
        return max(steps, default=None)

    def check(self, resume: bool) -> None:
        """Refuses to mix runs, before anything has been computed or written.

        Args:
            resume: whether an earlier run is to be continued, if there is one.

        Raises:
            UserError: if there is a run and ``resume`` is false, or if there is one of another
                configuration.
        """
        try:
            occupied = self.directory.exists() and any(self.directory.iterdir())
        except OSError as error:
            raise UserError(f"--checkpoint cannot be used: {one_line(error)}") from error
        if not resume and occupied:
            raise UserError(
                f"'{self.directory}' is not empty: continue its run with --resume or choose "
                "another --checkpoint directory"
            )
        if self.latest is None:
            return
        try:
            saved = json.loads((self.directory / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"'{self.directory}' has checkpoints but no readable config.json "
                f"({one_line(error)}): choose another --checkpoint directory"
            ) from error
        ours, theirs = _flatten(self.config), _flatten(saved)
        changed = [
            f"{name}={theirs.get(name)!r} (now {ours.get(name)!r})"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if changed:
            raise UserError(
                f"the run in '{self.directory}' has {', '.join(changed)}: resume it with the same "
                "options or choose another --checkpoint directory (in your own code, lro.migrate "
                "carries an optimizer's state over to another rank or other targets)"
            )

    def restore(self, like: Any) -> tuple[int, Any]:
        """Reads the latest checkpoint.

        Args:
            like: the state's shapes, types and, where given, shardings, as `jax.eval_shape` has
                them.

        Returns:
            How many updates the state has seen, and the state.

        Raises:
            UserError: if it does not fit or is damaged.
        """
        step = self.latest
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or device), like
        )
        manager = self._open()
        try:
            with ocp.StandardCheckpointer() as reader:
                saved = reader.metadata(self.directory / str(step) / "default").item_metadata.tree
            # Orbax does not say which leaf it is that does not fit.
            lro.check_restorable(saved, like)
            restored = manager.restore(step, args=ocp.args.StandardRestore(placed))
        except (AttributeError, ValueError, TypeError, KeyError, OSError) as error:
            raise UserError(
                f"the checkpoint of step {step} in '{self.directory}' cannot be restored "
                f"({one_line(error)[:400]}): choose another --checkpoint directory"
            ) from error
        assert step is not None
        return step, restored

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint; returns when it is complete.

        Args:
            step: how many updates the state has seen.
            state: a pytree of arrays.
        """
        manager = self._open()
        config = self.directory / "config.json"
        if jax.process_index() == 0 and not config.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a run killed while it writes must stay resumable.
            unfinished = config.with_suffix(".json.tmp")
            unfinished.write_text(json.dumps(self.config, indent=2) + "\n")
            unfinished.replace(config)
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # The training step donates its arguments: a write in the background would read memory
            # that the next step is overwriting.
            options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager


def open_runs(
    directory: pathlib.Path | None, configs: Mapping[str, Mapping[str, Any]], resume: bool
) -> dict[str, Checkpoints]:
    """The checkpoints of several runs, each below a directory of its name.

    Args:
        directory: of all of them, ``None`` if there are to be no checkpoints.
        configs: by the name of the run.
        resume: whether earlier runs are to be continued.

    Returns:
        Checkpoints by name that have been checked; nothing is written yet.

    Raises:
        UserError: if a run would be mixed with another.
    """
    if directory is None:
        return {}
    opened = {name: Checkpoints(directory / name, config) for name, config in configs.items()}
    for checkpoints in opened.values():
        checkpoints.check(resume)
    return opened


def nothing_to_resume(directory: pathlib.Path, runs: Iterable[str] = ()) -> UserError:
    """What to say if there is no checkpoint to go on from.

    Args:
        directory: where it was looked for.
        runs: whose, if there could be several.
    """
    names = " or ".join(runs)
    return UserError(
        f"--resume finds no checkpoint{names and f' of {names}'} in '{directory}': name the "
        "directory of an earlier run, or leave --resume out"
    )


def check_length(name: str, start: int, length: int, steps: str) -> None:
    """Refuses a run that is shorter than its checkpoint.

    Args:
        name: of the run.
        start: how much the checkpoint has seen.
        length: how much was asked for.
        steps: what is counted, as the option has it.

    Raises:
        UserError: if the checkpoint has seen more.
    """
    if start > length:
        raise UserError(
            f"the checkpoint of {name} has seen {start} {steps}, more than --{steps} {length}: "
            "ask for more of them"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
