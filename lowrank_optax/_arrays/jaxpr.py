"""Traced functions as lists of equations, which are evaluated one by one.

What differs between versions of JAX in how an equation is bound again is handled here.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

# JAX's own classes for these have moved between its versions.
Equation = Any
Jaxpr = Any
ClosedJaxpr = Jaxpr
Atom = Any
Operand = Any
"""What an equation is evaluated on: an array, or what stands for one."""


def bind(eqn: Equation, operands: Sequence[Operand]) -> Operand:
    """Runs one equation on other operands; a list of results if the primitive has several."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions: Sequence[Any] = ()
    if not isinstance(params, dict):  # before JAX 0.10, the functions came apart
        functions, params = params
    with getattr(getattr(eqn, "ctx", None), "manager", contextlib.nullcontext()):
        return eqn.primitive.bind(*functions, *operands, **params)


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Operand]]:
    """The open jaxpr and the constants of a closed one, in old and new versions of JAX."""
    if hasattr(jaxpr, "jaxpr"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, getattr(jaxpr, "consts", ())


def dependencies(closed: ClosedJaxpr) -> list[int]:
    """For each output of a function the inputs that it depends on, number i as bit ``1 << i``."""
    jaxpr, _ = open_jaxpr(closed)
    bits: dict[Any, int] = {variable: 1 << i for i, variable in enumerate(jaxpr.invars)}

    def of(atoms: Sequence[Atom]) -> int:
        found = 0
        for atom in atoms:
            found |= 0 if hasattr(atom, "val") else bits.get(atom, 0)
        return found

    for eqn in jaxpr.eqns:
        bits.update(dict.fromkeys(eqn.outvars, of(eqn.invars)))
    return [of([atom]) for atom in jaxpr.outvars]


class OnDemand:
    """The outputs of a traced function, each computed when it is asked for, from what it needs.

    Args:
        closed: the function's closed jaxpr.
        inputs: for each input a function that makes it, called when it is first needed.
    """

    def __init__(self, closed: ClosedJaxpr, inputs: Sequence[Callable[[], Array]]):
        jaxpr, consts = open_jaxpr(closed)
        self._outputs = jaxpr.outvars
        self._equations = jaxpr.eqns
        self._maker = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        # What prints or checks has no outputs that anybody needs, so it is asked for with the
        # first.
        self._waiting = [number for number, eqn in enumerate(jaxpr.eqns) if eqn.effects]
        self._inputs = dict(zip(jaxpr.invars, inputs, strict=True))
        self._values: dict[Atom, Operand] = dict(zip(jaxpr.constvars, consts, strict=True))

    def __call__(self, numbers: Sequence[int]) -> list[Operand]:
        """The outputs of these numbers."""
        wanted = [self._outputs[number] for number in numbers]
        # From the outputs back to what is there. Each equation is met once in all calls together.
        now, self._waiting = set(self._waiting), []
        needed = [*wanted, *(atom for number in now for atom in self._equations[number].invars)]
        while needed:
            atom = needed.pop()
            if hasattr(atom, "val") or atom in self._values:
                continue
            if atom in self._inputs:
                self._values[atom] = self._inputs.pop(atom)()
            elif (number := self._maker[atom]) not in now:
                now.add(number)
                needed.extend(self._equations[number].invars)
        for number in sorted(now):
            eqn = self._equations[number]
            results = bind(eqn, [self._read(atom) for atom in eqn.invars])
            outputs = results if eqn.primitive.multiple_results else [results]
            self._values.update(zip(eqn.outvars, outputs, strict=True))
        return [self._read(atom) for atom in wanted]

    def _read(self, atom: Atom) -> Operand:
        return atom.val if hasattr(atom, "val") else self._values[atom]
