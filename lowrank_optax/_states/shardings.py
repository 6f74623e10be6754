"""Where an optimizer's state lies on a mesh: ``state_shardings``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import is_box, rebox, unbox
from lowrank_optax._arrays.mesh import Names, axis_names, fit, spec_of, spread
from lowrank_optax._arrays.tree import OptState, Params, find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._bases.storage import packed_shape
from lowrank_optax._inner.sites import Site, mirrors, sites
from lowrank_optax._plan.plan import Projection
from lowrank_optax._subspace.state import SubspaceState


class _Placed(NamedTuple):
    """An array's shape with the mesh axes that each of its axes is on."""

    shape: tuple[int, ...]
    names: Sequence[Names]


def _derived(
    parameter: _Placed, shape: Sequence[int], axes: Sequence[int | None], mesh: Mapping[str, int]
) -> _Placed:
    """An array of which each axis is one of a parameter's, or a rank axis.

    It lies on the mesh axes of the axes that it shares with the parameter, where these divide it. A
    device would hold a whole copy along the parameter's other mesh axes: these divide it further,
    so that of a state that is r/m of the parameter's a device holds r/m of its share.
    """
    own = [() if axis is None else parameter.names[axis] for axis in axes]
    own = fit(own, shape, mesh)
    return _Placed(tuple(shape), spread(own, axes, tuple(shape), parameter.names, mesh))


def _bases_of(
    projection: Projection, parameter: _Placed, mesh: Mapping[str, int]
) -> dict[str, _Placed]:
    view, rank = projection.view, projection.rank
    return {
        side: _derived(parameter, view.basis_shape(side, rank), view.basis_axes(side), mesh)
        for side in projection.sides
    }


def _packed(basis: _Placed) -> _Placed:
    """A basis as it is placed in 4 bits: two columns in one, and these are on every device."""
    return basis._replace(shape=packed_shape(basis.shape))


def _core_of(projection: Projection, parameter: _Placed, mesh: Mapping[str, int]) -> _Placed:
    axes = projection.view.core_leaf_axes(projection.sides)
    return _derived(parameter, projection.core_shape, axes, mesh)


class _Projections:
    """How each weight is projected by the trackers in some node of a state, found once a node."""

    def __init__(self) -> None:
        self._of_node: dict[int, dict[str, Projection]] = {}

    def find(self, node: OptState, weight: str | None) -> Projection | None:
        """The projection of a weight, None where this node has none."""
        if id(node) not in self._of_node:
            trackers = find_states(node, TrackerState)
            found = {p.path: p for tracker in trackers for p in tracker.plan.projections}
            self._of_node[id(node)] = found
        return self._of_node[id(node)].get(weight or "")


def _candidates(
    site: Site, parameter: _Placed, mesh: Mapping[str, int], projections: _Projections
) -> list[_Placed]:
    """What an array of a weight may be: it is the first of these whose shape it has.

    In a tracker's state that is a basis; in a subspace optimizer's inner state a core; anything may
    be in the state of a lift. Elsewhere, and of a weight that is not projected, it has the weight's
    own shape.
    """
    for node, field in reversed(site.trail):
        projection = None
        if isinstance(node, TrackerState | SubspaceState):
            projection = projections.find(node, site.weight)
        if projection is None:
            continue
        bases = _bases_of(projection, parameter, mesh)
        if isinstance(node, TrackerState):
            # The bases of both sides may have one shape: the field's name tells.
            found = [*(p for side, p in bases.items() if side in field), *bases.values()]
            return [*found, *map(_packed, found)]
        core = _core_of(projection, parameter, mesh)
        return [core, *(bases.values() if field == "lift_state" else ()), parameter]
    return [parameter]


def _is_sharding(x: object) -> bool:
    return x is None or isinstance(x, Sharding | PartitionSpec)


def _shardings_of(params: Params, param_shardings: Any) -> list[Any]:
    """One sharding, partition spec or None for each leaf of params."""
    paths, leaves, _ = tree.flatten_with_paths(params)
    if param_shardings is None:
        return [getattr(unbox(leaf), "sharding", None) for leaf in leaves]
    if _is_sharding(param_shardings):
        return [param_shardings] * len(leaves)

    def is_leaf(x: object) -> bool:
        return _is_sharding(x) or is_box(x)

    pairs, _ = jax.tree_util.tree_flatten_with_path(param_shardings, is_leaf=is_leaf)
    given = {tree.path_name(path): unbox(x) for path, x in pairs}
    odd = sorted(set(given) ^ set(paths))
    if odd:
        where = "params have no such leaf" if odd[0] in given else "it has no sharding"
        raise ValueError(
            f"state_shardings: {odd[0]!r}: {where}; give param_shardings as a tree like params, "
            f"one NamedSharding or PartitionSpec for each of the {len(paths)} leaves, or one for "
            "all"
        )
    for path in paths:
        if not _is_sharding(given[path]):
            raise TypeError(
                f"state_shardings: {path!r}: expected a NamedSharding, a PartitionSpec or None, "
                f"got {given[path]!r}"
            )
    return [given[path] for path in paths]


def _mesh_sizes(shardings: Sequence[Any]) -> tuple[Any, dict[str, int]]:
    """The mesh of named shardings, or of the context for specs; and the sizes of its axes."""
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(
            f"state_shardings: the shardings are of {len(meshes)} different meshes; place all "
            "params on one mesh"
        )
    if meshes:
        (mesh,) = meshes
        return mesh, dict(mesh.shape)
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape) if not mesh.empty else {}
    for spec in shardings:
        if isinstance(spec, PartitionSpec):
            named = {name for names in axis_names(spec, len(spec)) for name in names}
            if named - sizes.keys():
                raise ValueError(
                    f"state_shardings: {spec} names the mesh axis {min(named - sizes.keys())!r}, "
                    f"and the mesh in use has {sorted(sizes) or 'none'}; call this inside "
                    "jax.set_mesh(mesh), or give NamedShardings"
                )
    return None, sizes


def state_shardings(
    tx: optax.GradientTransformation | optax.MultiSteps, params: Params, param_shardings: Any = None
) -> Any:
    """Where each array of an optimizer's state belongs, given where the parameters are.

    For ``jax.jit(tx.init, out_shardings=...)``, for restoring a checkpoint, and for the
    ``in_shardings`` and ``out_shardings`` of a training step. It knows the states of this
    library inside any wrapper: ``optax.chain``, ``partition``, ``masked``, ``MultiSteps``,
    ``inject_hyperparams``.

    - A basis is sharded like the side of the weight that it spans, a core and the moments on it
      like the other side; rank axes are whole on every device.
    - Mesh axes that the weight is on and that are then left over divide the array further, so
      that a device holds its share of the state and no more. What is moved for that is thin.
    - State of the shape of its parameter lies as the parameter does.
    - Everything else, scalars and metrics, is replicated, and so is what a mesh axis does not
      divide.

    Args:
        tx: any optimizer, with or without this library's transformations inside.
        params: a params tree of arrays, ``jax.ShapeDtypeStruct`` leaves or Flax boxes.
        param_shardings: a tree like params of ``NamedSharding`` or ``PartitionSpec``, or one for
            all leaves. Specs need a mesh in use, ``jax.set_mesh(mesh)``. None (default) takes
            the shardings that the leaves of ``params`` have.

    Returns:
        A tree of the structure of ``tx.init(params)`` that holds shardings, or specs if these
        were given.

    Raises:
        ValueError: if the shardings do not fit params, or are of several meshes.
        TypeError: if a leaf has none of these.

    Example:
        >>> import jax, jax.numpy as jnp, lowrank_optax as lro
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> params = {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
        >>> tx = lro.galore_adamw(1e-2, rank=8)
        >>> shardings = lro.state_shardings(tx, params, {"kernel": NamedSharding(mesh, P("fsdp"))})
        >>> tuple(shardings.tracker_state.reduction_basis["kernel"].spec)
        ('fsdp', None)
        >>> init = jax.jit(tx.init, out_shardings=shardings)
    """
    paths, boxes, _ = tree.flatten_with_paths(params)
    shardings = _shardings_of(params, param_shardings)
    present = {
        path: (tuple(unbox(box).shape), sharding)
        for path, box, sharding in zip(paths, boxes, shardings, strict=True)
        if box is not None
    }
    mesh, sizes = _mesh_sizes([sharding for _, sharding in present.values()])
    placed: dict[str, _Placed] = {}
    for path, (shape, sharding) in present.items():
        spec = getattr(sharding, "spec", sharding)
        if not isinstance(spec, PartitionSpec):
            spec = PartitionSpec()
        if len(spec) > len(shape):
            raise ValueError(
                f"state_shardings: {path!r}: {spec} has more entries than shape {shape} has axes"
            )
        names = fit(axis_names(spec, len(shape)), shape, sizes)
        placed[path] = _Placed(shape, names)
    alone = next((s for _, s in present.values() if isinstance(s, Sharding)), None)
    named = any(isinstance(s, PartitionSpec) for _, s in present.values())

    def leaf(owner: str | None, names: Sequence[Names]) -> Any:
        spec = spec_of(names)
        if mesh is None:
            return spec if named or alone is None else alone
        kind = getattr(present[owner][1], "memory_kind", None) if owner is not None else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    # Shapes alone: no mesh needs to be in use, and nothing is placed.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(tx.init, shapes)
    leaves, treedef = tree.flatten(state)
    projections = _Projections()
    for number, site in enumerate(sites(state, mirrors(state, shapes, tx))):
        if site.value is None:
            continue
        shape = tuple(site.value.shape)
        candidates: list[_Placed] = []
        if site.weight in placed:
            candidates = _candidates(site, placed[site.weight], sizes, projections)
        found = next((c for c in candidates if c.shape == shape), None)
        names = [()] * len(shape) if found is None else found.names
        made = leaf(None if found is None else site.weight, names)
        leaves[number] = rebox(leaves[number], made)
    return tree.unflatten(treedef, leaves)
