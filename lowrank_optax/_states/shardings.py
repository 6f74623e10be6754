"""Where an optimizer's state lies on a mesh: ``state_shardings``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lowrank_optax._arrays import tree
from lowrank_optax._arrays.boxes import is_box, rebox, unbox
from lowrank_optax._arrays.mesh import Names, axis_names, fit, spec_of, spread
from lowrank_optax._arrays.tree import find_states
from lowrank_optax._bases.state import TrackerState
from lowrank_optax._bases.storage import packed_shape
from lowrank_optax._plan.plan import LeafPlan, Plan
from lowrank_optax._subspace.state import SubspaceState


class _Placed(NamedTuple):
    """An array's shape with the mesh axes that each of its axes is on."""

    shape: tuple[int, ...]
    names: Sequence[Names]


# By path, what a leaf of the state may be that belongs to a leaf of params: the first of these
# whose shape it has.
_Candidates = Mapping[str, Sequence[_Placed]]


def _derived(
    parameter: _Placed, shape: Sequence[int], axes: Sequence[int | None], mesh: Mapping[str, int]
) -> _Placed:
    """An array of which each axis is one of a parameter's, or a rank axis."""
    own = [() if axis is None else parameter.names[axis] for axis in axes]
    own = fit(own, shape, mesh)
    return _Placed(tuple(shape), spread(own, axes, tuple(shape), parameter.names, mesh))


def _bases_of(leaf: LeafPlan, parameter: _Placed, mesh: Mapping[str, int]) -> dict[str, _Placed]:
    view = leaf.view
    if view is None:
        return {}
    return {
        side: _derived(parameter, view.basis_shape(side, leaf.rank), view.basis_axes(side), mesh)
        for side in leaf.sides
    }


def _packed(basis: _Placed) -> _Placed:
    """A basis as it is placed in 4 bits: two columns in one, and these are on every device."""
    return basis._replace(shape=packed_shape(basis.shape))


def _core_of(leaf: LeafPlan, parameter: _Placed, mesh: Mapping[str, int]) -> list[_Placed]:
    if leaf.view is None or not leaf.sides:
        return []
    return [_derived(parameter, leaf.core_shape, leaf.view.core_leaf_axes(leaf.sides), mesh)]


class _Walk:
    """Finds the placement of every array of a state, node by node.

    Args:
        mesh: the size of each mesh axis.
        leaf: makes the entry of the result from an array's placement.
    """

    def __init__(self, mesh: Mapping[str, int], leaf: Any):
        self._mesh = mesh
        self._leaf = leaf

    def __call__(self, state: Any, of: _Candidates) -> Any:
        """A tree like ``state``, where ``of`` are the arrays that its leaves may resemble."""

        def is_node(x: Any) -> bool:
            return isinstance(x, SubspaceState | TrackerState) or x is None or is_box(x)

        pairs, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_node)
        return jax.tree.unflatten(treedef, [self._node(path, x, of) for path, x in pairs])

    def _node(self, path: Sequence[Any], node: Any, of: _Candidates) -> Any:
        if isinstance(node, SubspaceState):
            return self._subspace(node, of)
        if isinstance(node, TrackerState):
            return self._tracker(node, of)
        if node is None:
            return None
        return self._array(tree.path_name(path), node, of)

    def _array(self, path: str, box: Any, of: _Candidates) -> Any:
        shape = tuple(unbox(box).shape)
        # A leaf of the state that belongs to params has the params' path at its end; params
        # that are one array have no path.
        parts = path.split("/")
        ends = ["/".join(parts[start:]) for start in range(len(parts))] + [""]
        owner = next((end for end in ends if end in of), None)
        candidates = of[owner] if owner is not None else ()
        placed = next((c for c in candidates if c.shape == shape), None)
        key = owner if placed is not None else None
        return rebox(box, self._leaf(key, placed.names if placed else [()] * len(shape)))

    def _plans(self, state: Any) -> dict[str, LeafPlan]:
        plans: list[Plan] = [tracker.plan for tracker in find_states(state, TrackerState)]
        return {leaf.path: leaf for plan in plans for leaf in plan.leaves}

    def _subspace(self, state: SubspaceState, of: _Candidates) -> SubspaceState:
        plans = self._plans(state.tracker_state)
        cores, anything = {}, {}
        for path, candidates in of.items():
            leaf, parameter = plans.get(path), candidates[0]
            core = _core_of(leaf, parameter, self._mesh) if leaf else []
            bases = _bases_of(leaf, parameter, self._mesh) if leaf else {}
            cores[path] = [*core, *candidates]
            anything[path] = [*core, *bases.values(), *candidates]
        return SubspaceState(
            tracker_state=self(state.tracker_state, of),
            inner_state=self(state.inner_state, cores),
            lift_state=self(state.lift_state, anything),
            fidelity=self(state.fidelity, {}),
        )

    def _tracker(self, state: TrackerState, of: _Candidates) -> TrackerState:
        plans = self._plans(state)
        fields = {}
        for name, value in state._asdict().items():
            bases = {}
            for path, (parameter, *_) in of.items():
                sides = _bases_of(plans[path], parameter, self._mesh) if path in plans else {}
                # The bases of both sides may have one shape: the field's name tells.
                found = [*(p for side, p in sides.items() if side in name), *sides.values()]
                bases[path] = [*found, *map(_packed, found)]
            fields[name] = self(value, bases)
        return type(state)(**fields)


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, Sharding | PartitionSpec)


def _shardings_of(params: Any, param_shardings: Any) -> list[Any]:
    """One sharding, partition spec or None for each leaf of params."""
    paths, leaves, _ = tree.flatten_with_paths(params)
    if param_shardings is None:
        return [getattr(unbox(leaf), "sharding", None) for leaf in leaves]
    if _is_sharding(param_shardings):
        return [param_shardings] * len(leaves)

    def is_leaf(x: Any) -> bool:
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
    tx: optax.GradientTransformation | optax.MultiSteps, params: Any, param_shardings: Any = None
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
        >>> shardings.tracker_state.reduction_basis["kernel"].spec
        P('fsdp', None)
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
    placed: dict[str, list[_Placed]] = {}
    for path, (shape, sharding) in present.items():
        spec = getattr(sharding, "spec", sharding)
        if not isinstance(spec, PartitionSpec):
            spec = PartitionSpec()
        if len(spec) > len(shape):
            raise ValueError(
                f"state_shardings: {path!r}: {spec} has more entries than shape {shape} has axes"
            )
        names = fit(axis_names(spec, len(shape)), shape, sizes)
        placed[path] = [_Placed(shape, names)]
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
    return _Walk(sizes, leaf)(jax.eval_shape(tx.init, shapes), placed)
