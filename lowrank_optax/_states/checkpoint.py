"""Telling before a restore whether a checkpoint holds the state of this optimizer."""

from lowrank_optax._arrays.boxes import unbox
from lowrank_optax._arrays.tree import PyTree, flatten_with_paths


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    paths, leaves, _ = flatten_with_paths(tree)
    # Orbax describes what has no arrays, such as a masked position, by entries without a shape.
    shapes = [getattr(unbox(leaf), "shape", None) for leaf in leaves]
    return {p: tuple(shape) for p, shape in zip(paths, shapes, strict=True) if shape is not None}


def check_restorable(saved: PyTree, like: PyTree) -> None:
    """Raises unless a checkpoint has the leaves that a state has, in its shapes.

    Checkpoint libraries report a mismatch by shapes alone, or not at all. This one names the leaf,
    and what to do where rank or targets of the optimizer have changed.

    Args:
        saved: the checkpoint's tree of anything with a shape: Orbax's metadata, such as
            ``manager.item_metadata(step)`` or ``checkpointer.metadata(path).item_metadata.tree``,
            or restored arrays.
        like: the tree that is wanted, such as ``jax.eval_shape(tx.init, params)``, alone or
            beside params.

    Raises:
        ValueError: if a leaf is missing, is not wanted, or has another shape.
        TypeError: if ``saved`` holds no shapes.

    Example:
        >>> import jax, jax.numpy as jnp, lowrank_optax as lro
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> saved = lro.galore_adamw(1e-2, rank=4).init(params)
        >>> lro.check_restorable(saved, lro.galore_adamw(1e-2, rank=4).init(params))
        >>> lro.check_restorable(saved, lro.galore_adamw(1e-2, rank=8).init(params))
        Traceback (most recent call last):
        ...
        ValueError: 'tracker_state/reduction_basis/kernel' has shape (16, 4) in the checkpoint and \
(16, 8) here: the optimizer that wrote it had another rank or other targets. Restore it as that \
one, then lro.migrate(opt_state, old_tx, new_tx, params)
    """
    there, here = _shapes(saved), _shapes(like)
    if here and not there:
        raise TypeError(
            "check_restorable: saved holds nothing with a shape; give the metadata of the "
            "checkpoint's arrays, e.g. checkpointer.metadata(path).item_metadata.tree"
        )
    # Bases say most; counters differ with them.
    for path in sorted(there | here, key=lambda path: ("basis/" not in f"{path}/", path)):
        if there.get(path) == here.get(path):
            continue
        if path not in there:
            what = f"has shape {here[path]} here and is not in the checkpoint"
        elif path not in here:
            what = f"has shape {there[path]} in the checkpoint and is not wanted here"
        else:
            what = f"has shape {there[path]} in the checkpoint and {here[path]} here"
        raise ValueError(
            f"{path!r} {what}: the optimizer that wrote it had another rank or other targets. "
            "Restore it as that one, then lro.migrate(opt_state, old_tx, new_tx, params)"
        )
