"""The matrix-free backward pass: ``compact_value_and_grad``.

The gradient of a projected weight is never formed; its core comes out of the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowrank_optax._arrays.tree import OptState
from lowrank_optax._bases.storage import store_all
from lowrank_optax._matrix_free.loss import CompactLoss
from lowrank_optax._matrix_free.products import main_product, split_extra
from lowrank_optax._matrix_free.refresh import refreshed_bases
from lowrank_optax._matrix_free.targets import CompactTarget, find_targets
from lowrank_optax._plan.view import Bases


class CompactBases(NamedTuple):
    """The bases that compact gradients were made with; the ``bases`` argument of ``update``.

    Attributes:
        bases: the bases of each target, by path.
        refreshed: for each target whether they are new, a boolean scalar.
        directions: the extra directions that the lift of some targets asked for, by path; None if
            none did.
    """

    bases: dict[str, Bases]
    refreshed: dict[str, Array]
    directions: dict[str, Bases] | None = None


def compact_value_and_grad(
    loss_fn: Callable[..., Any], argnums: int = 0, has_aux: bool = False
) -> Callable[..., Any]:
    r"""``jax.value_and_grad`` whose gradients of projected weights are cores.

    For :math:`y = xW` and a basis :math:`P` of the reduction side,

    .. math:: P^T G = P^T x^T \delta = (xP)^T \delta

    so the backward pass makes the core from two thin products. The full gradient never exists,
    neither does a sum of it over micro-batches or devices, and :math:`xP` is kept for the
    backward pass in place of :math:`x`.

    The loss is any function of params: plain JAX, Flax, Equinox; with ``jit``, ``scan``, ``remat``,
    ``cond`` and ``vmap`` inside. A use of a weight that has no compact form, a convolution or a
    custom derivative say, gives the exact core all the same, by projecting its full
    cotangent; :func:`compact_report` lists them.

    Args:
        loss_fn: a function that returns a scalar, or a scalar and aux data with ``has_aux``.
        argnums: which positional argument is params.
        has_aux: whether ``loss_fn`` returns aux data.

    Returns:
        A function of the arguments of ``loss_fn`` and these keyword arguments:

        - ``opt_state``: the state of an optimizer that holds a :func:`galore_project`, through any
          wrapper. From it come the bases, and whether a refresh is due: that then happens
          inside, in further backward passes on the same batch, as ``method="subspace"`` does on
          full gradients. ``"random"`` and ``"frozen"`` methods work too; ``"svd"`` and
          ``"gram"`` need the full gradient and are refused.
        - ``bases``: bases to use as they are, with no refresh; those that another micro-batch of
          the same step returned.
        - ``extra``: by path, extra directions ``(*batch, *side, k)`` on a target's side, whose
          products with the gradient are returned as ``Compact.extra``.

        It returns ``(value, grads, bases)``: ``value`` as ``jax.value_and_grad`` gives it,
        ``grads`` like params with a :class:`Compact` at each target, and the bases, which
        ``update`` takes as its extra argument ``bases``.

    Raises:
        ValueError: when called, if ``opt_state`` holds no subspace optimizer, belongs to other
            params, is wrapped in ``optax.MultiSteps`` or has a method that needs full gradients.

    Example:
        >>> import jax, jax.numpy as jnp, optax, lowrank_optax as lro
        >>> params = {"kernel": jnp.ones((16, 32))}
        >>> x = jnp.ones((8, 16))
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["kernel"]) ** 2)
        >>> tx = lro.galore_adamw(1e-2, rank=4)
        >>> opt_state = tx.init(params)
        >>> grad_fn = lro.compact_value_and_grad(loss_fn)
        >>> value, grads, bases = grad_fn(params, x, opt_state=opt_state)
        >>> grads["kernel"].core.shape
        (4, 32)
        >>> updates, opt_state = tx.update(grads, opt_state, params, bases=bases)
        >>> updates["kernel"].shape
        (16, 32)
    """

    def grad_fn(
        *args: Any,
        opt_state: OptState,
        bases: CompactBases | None = None,
        extra: dict[str, Array] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, CompactBases]:
        targets = find_targets(opt_state)
        loss = CompactLoss(loss_fn, args, kwargs, argnums, has_aux, targets)
        paths = [target.path for target in targets]
        more = _check_extra(extra or {}, targets)
        if bases is None:
            current, new = refreshed_bases(loss)
            directions = _drawn(targets, current) or None
        else:
            current = [target.wide(bases.bases[target.path]) for target in targets]
            new = [bases.refreshed[path] for path in paths]
            directions = bases.directions
        more = [
            directions[path].only() if directions and path in directions else given
            for path, given in zip(paths, more, strict=True)
        ]
        products = [[main_product(*row)] for row in zip(targets, current, more, strict=True)]
        value, aux, gradients, found = loss.value_and_products(products)
        compact = [
            split_extra(target, core, columns)
            for target, (core,), columns in zip(targets, found, more, strict=True)
        ]
        value, grads = loss.results(value, aux, gradients, compact)
        stored = {
            target.path: store_all(used, target.projection.view, target.bases)
            for target, used in zip(targets, current, strict=True)
        }
        return value, grads, CompactBases(stored, dict(zip(paths, new, strict=True)), directions)

    return grad_fn


def _drawn(targets: Sequence[CompactTarget], bases: Sequence[Bases]) -> dict[str, Bases]:
    """The extra directions of this step, for the targets whose lift asks for some."""
    groups: dict[int, list[int]] = {}
    for place, target in enumerate(targets):
        if target.extra is not None:
            # Targets of one optimizer share its count and its draws.
            groups.setdefault(id(target.count), []).append(place)
    directions = {}
    for places in groups.values():
        group = [targets[place] for place in places]
        asked, count = group[0].extra, jnp.asarray(group[0].count)
        if asked is not None:
            projections = [target.projection for target in group]
            drawn = asked.draw(projections, [bases[place] for place in places], count)
            directions |= {p.path: q for p, q in zip(projections, drawn, strict=True)}
    return directions


def _check_extra(extra: dict[str, Array], targets: Sequence[CompactTarget]) -> list[Array | None]:
    """Extra directions in the order of targets, each of the shape that its side wants."""
    known = {target.path: target for target in targets}
    for path, columns in extra.items():
        if path not in known:
            raise ValueError(
                f"extra: {path!r} is no target; targets are {', '.join(map(repr, known))}"
            )
        projection = known[path].projection
        if known[path].extra is not None:
            raise ValueError(
                f"extra: {path!r} has a lift that draws its own extra directions, which are in the "
                "bases that come beside the gradients"
            )
        if len(projection.sides) != 1:
            raise ValueError(f"extra: {path!r} has bases on both sides, which leave no room for it")
        expected = projection.view.basis_shape(projection.sides[0], columns.shape[-1])
        if columns.shape != expected:
            raise ValueError(
                f"extra: {path!r} got shape {columns.shape}, expected {expected}: batch axes, the "
                f"{projection.sides[0]} axes, then one column a direction"
            )
    return [extra.get(target.path) for target in targets]
