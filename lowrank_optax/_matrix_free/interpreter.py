"""Running a loss with factored weights in the place of arrays.

The loss is traced to a jaxpr, which is then evaluated equation by equation. Equations that
see no factored weight are bound as they are, with whatever they contain. Control flow that
carries factored weights is rebuilt with the public functions of ``jax.lax``.

This is the one file that knows the parameters of JAX's primitives. They are no stable
interface: what changed between versions is handled here (and in `_arrays/jaxpr.py`), and what is
not recognised falls back to an exact, materialised weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from lowrank_optax._arrays.jaxpr import Atom, Equation, Jaxpr, Operand, bind, open_jaxpr
from lowrank_optax._matrix_free import rules
from lowrank_optax._matrix_free.weight import Factored, materialise

# (path, primitive, whether it has a compact backward pass), for each use of a weight.
Use = tuple[str, str, bool]
Report = Callable[[Use], None]

_Rule = Callable[[Equation, Sequence[Operand], Report], Operand]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Operand], inputs: Sequence[Operand], report: Report
) -> list[Operand]:
    """Evaluates a jaxpr whose inputs may be factored weights.

    Args:
        jaxpr: an open jaxpr.
        consts: values of its constants.
        inputs: values of its inputs; arrays or :class:`Factored`.
        report: called with each use of a factored weight.

    Returns:
        The outputs; a weight that passes straight through stays factored.
    """
    values: dict[Atom, Operand] = {}

    def read(atom: Atom) -> Operand:
        return atom.val if hasattr(atom, "val") else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(isinstance(operand, Factored) for operand in operands):
            results = _apply(eqn, operands, report)
        else:
            results = bind(eqn, operands)
        outputs = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    rule = _RULES.get(eqn.primitive.name)
    results = NotImplemented if rule is None else rule(eqn, operands, report)
    if results is NotImplemented:
        results = bind(eqn, _materialised(operands, eqn.primitive.name, report))
    return results


def _materialised(operands: Sequence[Operand], primitive: str, report: Report) -> list[Operand]:
    arrays = []
    for operand in operands:
        if isinstance(operand, Factored):
            report((operand.path, primitive, False))
            operand = materialise(operand)
        arrays.append(operand)
    return arrays


def _as_arrays(jaxpr: Jaxpr, operands: Sequence[Operand], report: Report) -> list[Operand]:
    """Evaluates an inner jaxpr; weights that it returns are materialised."""
    inner, consts = open_jaxpr(jaxpr)
    return _materialised(evaluate(inner, consts, operands, report), "output", report)


# Products ----------------------------------------------------------------------------------


@_rule("dot_general")
def _dot_general(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    left, right = operands
    if isinstance(left, Factored) and isinstance(right, Factored):
        return NotImplemented
    weight_first = isinstance(left, Factored)
    weight, x = (left, right) if weight_first else (right, left)
    numbers = eqn.params["dimension_numbers"]
    own = 0 if weight_first else 1
    if not rules.can_dot(weight, numbers[0][own], numbers[1][own]):
        return NotImplemented
    others = {k: v for k, v in eqn.params.items() if k != "dimension_numbers"}
    report((weight.path, "dot_general", True))
    return rules.dot(x, weight, numbers, weight_first, others)


@_rule("gather")
def _gather(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    table, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not isinstance(table, Factored) or not rules.can_gather(table, numbers, sizes):
        return NotImplemented
    report((table.path, "gather", True))
    return rules.gather(table, indices, eqn.params, eqn.primitive.bind)


# Changes of form ---------------------------------------------------------------------------


@_rule("convert_element_type", "reduce_precision", "copy", "copy_p", "name", "sharding_constraint")
def _same_axes(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    del report
    (weight,) = operands
    return weight.with_weight(bind(eqn, [weight.weight]))


@_rule("transpose")
def _transpose(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    del report
    (weight,) = operands
    axes = tuple(weight.axes[i] for i in eqn.params["permutation"])
    return weight.with_weight(bind(eqn, [weight.weight]), axes)


@_rule("reshape", "squeeze", "expand_dims")
def _reshape(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    del report
    if len(operands) != 1 or (eqn.params.get("dimensions") and eqn.primitive.name == "reshape"):
        return NotImplemented
    (weight,) = operands
    result = rules.reshape(weight, eqn.outvars[0].aval.shape)
    return NotImplemented if result is None else result


@_rule("slice")
def _slice(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    """One layer of a stack, ``w[i]`` with a Python index."""
    del report
    (weight,) = operands
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    if eqn.params["strides"] is not None and any(s != 1 for s in eqn.params["strides"]):
        return NotImplemented
    shape = weight.weight.shape
    cut = [i for i in range(len(shape)) if (starts[i], limits[i]) != (0, shape[i])]
    if not cut:
        return weight
    if len(cut) != 1 or weight.batch_axis(cut[0]) is None or limits[cut[0]] - starts[cut[0]] != 1:
        return NotImplemented
    start = starts[cut[0]]
    return _one_layer(
        weight, cut[0], lambda x, axis: jax.lax.index_in_dim(x, start, axis, keepdims=False)
    )


@_rule("dynamic_slice")
def _dynamic_slice(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    """One layer of a stack, ``w[i]`` with a traced index."""
    del report
    weight, *starts = operands
    if not isinstance(weight, Factored) or any(isinstance(s, Factored) for s in starts):
        return NotImplemented
    shape, sizes = weight.weight.shape, eqn.params["slice_sizes"]
    cut = [i for i in range(len(shape)) if sizes[i] != shape[i]]
    if not cut:
        return weight
    if len(cut) != 1 or len(starts) != len(shape):
        return NotImplemented
    if weight.batch_axis(cut[0]) is None or sizes[cut[0]] != 1:
        return NotImplemented
    start = starts[cut[0]]
    return _one_layer(
        weight,
        cut[0],
        lambda x, axis: jax.lax.dynamic_index_in_dim(x, start, axis, keepdims=False),
    )


def _one_layer(weight: Factored, position: int, take: Callable[[Array, int], Array]) -> Factored:
    layer = weight.select(position, take(weight.weight, position), take)
    shape = list(layer.weight.shape)
    shape.insert(position, 1)
    axes = (*layer.axes[:position], (), *layer.axes[position:])
    return layer.with_weight(layer.weight.reshape(shape), axes)


# Control flow ------------------------------------------------------------------------------


@_rule("jit", "pjit", "closed_call", "core_call")
def _jit(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any("Unspecified" not in type(sharding).__name__ for sharding in shardings):
        return NotImplemented
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner, consts = open_jaxpr(jaxpr)
    # Inlined: the compiler would do so anyway, and a weight may come out factored.
    return evaluate(inner, consts, operands, report)


@_rule("checkpoint", "remat2", "remat")
def _checkpoint(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    def body(*operands):
        return _as_arrays(eqn.params["jaxpr"], operands, report)

    rematerialised = jax.checkpoint(
        body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return rematerialised(*operands)


def _scan_groups(params: dict[str, Any], operands: Sequence[Operand]) -> tuple[list, list, list]:
    """A scan's operands as constants, carry and scanned inputs."""
    if "num_consts" in params:
        consts = params["num_consts"]
        end = consts + params["num_carry"]
    else:
        # From JAX 0.11 the groups are described by a tree of operands.
        groups = params["ft_in"].update(list(operands)).unpack()
        consts = len(list(groups[0].vals))
        end = consts + len(list(groups[1].vals))
    return list(operands[:consts]), list(operands[consts:end]), list(operands[end:])


@_rule("scan")
def _scan(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    params = eqn.params
    consts, carry, scanned = _scan_groups(params, operands)
    carry = _materialised(carry, "scan carry", report)
    inputs = []
    for x in scanned:
        if isinstance(x, Factored) and x.batch_axis(0) is None:
            (x,) = _materialised([x], "scan", report)
        if isinstance(x, Factored):
            # The scanned axis leads in every array that the loop slices.
            layers = x.select(0, x.weight, lambda array, axis: jax.numpy.moveaxis(array, axis, 0))
            inputs.append(layers)
        else:
            inputs.append(x)

    # Consts are passed through the carry's closure: the loop does not slice them.
    def body(carry, inputs):
        outputs = _as_arrays(params["jaxpr"], [*consts, *carry, *inputs], report)
        return outputs[: len(carry)], outputs[len(carry) :]

    carry, outputs = jax.lax.scan(
        body,
        carry,
        inputs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *outputs]


@_rule("cond")
def _cond(eqn: Equation, operands: Sequence[Operand], report: Report) -> Operand:
    index, *arguments = operands
    if isinstance(index, Factored):
        return NotImplemented
    branches = [
        lambda *arguments, jaxpr=jaxpr: _as_arrays(jaxpr, arguments, report)
        for jaxpr in eqn.params["branches"]
    ]
    return jax.lax.switch(index, branches, *arguments)
