"""Hugging Face checkpoints of safetensors: into the decoder's parameters, and back.

The layers of a checkpoint are single matrices ``(out, in)``; ours are stacked kernels ``(layers,
in, out)``. Of a sharded leaf, only what this process's devices hold is read.
"""

import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from huggingface.config import read_json
from running.errors import UserError, one_line

Params = dict[str, Any]

_INDEX = "model.safetensors.index.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Hugging Face checkpoints need safetensors: pip install 'lowrank-optax[llm]'"
        ) from error
    return safetensors


def hf_name(path: tuple[str, ...], layer: int | None = None) -> str:
    """The name in a checkpoint of one of our parameters.

    Args:
        path: its keys, for instance ``("layers", "mlp", "up_proj", "kernel")``.
        layer: which of the stacked layers.
    """
    *modules, kind = path
    if layer is not None:
        modules[0] = f"layers.{layer}"
    prefix = "" if path[0] == "lm_head" else "model."
    return f"{prefix}{'.'.join(modules)}.{'bias' if kind == 'bias' else 'weight'}"


def _hf_names(path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors, with their shapes, of one of our parameters."""
    own = shape[1:] if path[0] == "layers" else shape
    own = own[::-1] if path[-1] == "kernel" else own
    if path[0] != "layers":
        return {hf_name(path): own}
    return {hf_name(path, layer): own for layer in range(shape[0])}


def _leaves(tree: Params) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield tuple(entry.key for entry in path), leaf


class TensorFiles:
    """The tensors of a checkpoint directory, whichever files they are in.

    Args:
        directory: with ``model.safetensors``, or shards and their index.

    Raises:
        UserError: if there is no such file, or one is missing or damaged.
    """

    def __init__(self, directory: pathlib.Path):
        self._library = _safetensors()
        self._opened: dict[pathlib.Path, Any] = {}
        self.directory = directory
        index, single = directory / _INDEX, directory / "model.safetensors"
        if index.exists():
            weights = read_json(index).get("weight_map")
            if not isinstance(weights, dict):
                raise UserError(f"'{index}' has no weight_map: download it again")
            self._files = {name: directory / file for name, file in weights.items()}
            for file in sorted(set(self._files.values())):
                if not file.exists():
                    raise UserError(
                        f"'{file}' is missing, though {_INDEX} names it: download it again"
                    )
        elif single.exists():
            self._files = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise UserError(
                f"'{directory}' has neither model.safetensors nor {_INDEX}: name the directory of "
                "a checkpoint in safetensors format"
            )

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._files)

    def slice_of(self, name: str) -> Any:
        """A lazily read tensor: ``get_shape()``, and ``[...]`` for a NumPy array.

        Raises:
            UserError: if its file does not have it after all.
        """
        file = self._files[name]
        try:
            return self._open(file).get_slice(name)
        except self._library.SafetensorError as error:
            raise UserError(f"'{file}' lacks {name}: download it again") from error

    def _open(self, file: pathlib.Path) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = self._library.safe_open(file, framework="numpy")
            except (OSError, self._library.SafetensorError) as error:
                raise UserError(
                    f"'{file}' is damaged ({one_line(error)}): download it again"
                ) from error
        return self._opened[file]


def load(directory: pathlib.Path, shapes: Params, shardings: Params | None = None) -> Params:
    """Reads a checkpoint.

    Args:
        directory: of the checkpoint.
        shapes: of the decoder's parameters, without adapters, with the types that they are to
            have; from ``jax.eval_shape(init, key)``.
        shardings: a tree like ``shapes``; ``None`` puts everything on the first device.

    Returns:
        The parameters.

    Raises:
        UserError: if a file, a tensor or a shape is not what the config asks for.
    """
    files = TensorFiles(directory)
    expected: dict[str, tuple[int, ...]] = {}
    for path, like in _leaves(shapes):
        expected |= _hf_names(path, like.shape)
    _check(files, expected, tied="lm_head" not in shapes)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    placed = dict(_leaves(shardings))
    arrays = [_read(files, path, like, placed[path]) for path, like in _leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _check(files: TensorFiles, expected: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    ignored = {name for name in files.names if name.endswith("rotary_emb.inv_freq")}
    if tied:  # some checkpoints have the head twice
        ignored.add("lm_head.weight")
    for what, names in (
        ("lacks", expected.keys() - files.names),
        ("has, and config.json knows nothing of,", files.names - expected.keys() - ignored),
    ):
        if names:
            first = min(names)
            raise UserError(
                f"'{files.directory}' {what} {first} ({len(names)} such tensors): config.json and "
                "weights must be of one model"
            )
    for name, shape in expected.items():
        found = tuple(files.slice_of(name).get_shape())
        if found != shape:
            raise UserError(
                f"'{files.directory}': {name} has shape {found}, and config.json says {shape}: "
                "they must be of one model"
            )


def _read(
    files: TensorFiles, path: tuple[str, ...], like: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """One parameter, of which each device gets its part."""

    def matrix(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if path[-1] == "kernel":
            return files.slice_of(name)[index[::-1]].T
        return files.slice_of(name)[index]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or tuple(slice(None) for _ in like.shape)
        if path[0] != "layers":
            return matrix(hf_name(path), index).astype(like.dtype)
        layers = range(like.shape[0])[index[0]]
        sizes = [len(range(n)[i]) for n, i in zip(like.shape[1:], index[1:], strict=True)]
        out = np.empty((len(layers), *sizes), like.dtype)
        for row, layer in enumerate(layers):
            out[row] = matrix(hf_name(path, layer), index[1:])
        return out

    return jax.make_array_from_callback(like.shape, sharding, part)


def check_export(directory: pathlib.Path, source: pathlib.Path, overwrite: bool) -> None:
    """Refuses to export where something would be lost.

    Args:
        directory: where to.
        source: the checkpoint that was trained.
        overwrite: whether an earlier export may be replaced.

    Raises:
        UserError: if ``directory`` is the source, or is not empty and may not be overwritten.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--export {directory} is a file: name a new directory")
    if directory.resolve() == source.resolve():
        raise UserError(f"--export {directory} is the model itself: name another directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise UserError(
            f"'{directory}' is not empty: choose another --export directory, or add --overwrite to "
            "replace the model in it"
        )


def export(
    directory: pathlib.Path,
    params: Params,
    source: pathlib.Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint that ``transformers`` loads.

    It is written beside the directory and moved there once complete. Host memory holds one shard.

    Args:
        directory: where to.
        params: of the decoder, without adapters; saved in the types that they have.
        source: the checkpoint that was loaded: its config and its tokenizer are copied.
        overwrite: replace the model that is there.
        shard_bytes: the largest size of a file, unless one tensor is larger.

    Raises:
        UserError: as `check_export`.
    """
    check_export(directory, source, overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as name:
        partial = pathlib.Path(name)
        _write_tensors(partial, params, shard_bytes)
        config = read_json(source / "config.json")
        dtype = str(params["norm"]["scale"].dtype)
        key = "dtype" if "dtype" in config else "torch_dtype"
        (partial / "config.json").write_text(json.dumps(config | {key: dtype}, indent=2) + "\n")
        for file in _TOKENIZER:
            if (source / file).exists():
                shutil.copyfile(source / file, partial / file)
        directory.mkdir(exist_ok=True)
        for stale in [*directory.glob("model*.safetensors"), directory / _INDEX]:
            stale.unlink(missing_ok=True)
        for file in partial.iterdir():
            file.replace(directory / file.name)


def _write_tensors(directory: pathlib.Path, params: Params, shard_bytes: int) -> None:
    shards: list[list[tuple[str, tuple[str, ...], int | None]]] = [[]]
    size = 0
    for path, leaf in _leaves(params):
        names = _hf_names(path, leaf.shape)
        one = leaf.size * leaf.dtype.itemsize // len(names)
        for layer, name in enumerate(names):
            if shards[-1] and size + one > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append((name, path, layer if path[0] == "layers" else None))
            size += one
    leaves = dict(_leaves(params))
    save = _safetensors().numpy.save_file
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        number_of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"model{number_of}.safetensors"
        tensors = {}
        for name, path, layer in shard:
            array = np.asarray(leaves[path] if layer is None else leaves[path][layer])
            tensors[name] = np.ascontiguousarray(array.T if path[-1] == "kernel" else array)
        save(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
