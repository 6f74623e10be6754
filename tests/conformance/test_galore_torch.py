"""The authors' own implementation, ``galore_torch.GaLoreAdamW``, on the same gradients.

Two things are free in GaLore and must be agreed on before two implementations can be compared:

* **Signs.** A singular vector is defined up to its sign, and SVD routines differ. While one
  basis lasts the sign drops out: a flipped vector flips its row of the first moment and leaves
  the second alone, so ``P u`` is the same. But galore_torch keeps moments across a refresh, and
  there the old row meets the new vector: the result does depend on the sign. Hence
  :class:`AlignedProjector`: the authors' projector, whose new vectors are turned to point
  the way ours do. It asserts that each is ours or its mirror image.
* **Epsilon.** galore_torch adds eps before the bias correction of the second moment, optax
  after it: ``sqrt(v) + eps`` against ``sqrt(v / w) + eps`` with ``w = 1 - b2**t``. Its eps is thus
  optax's divided by ``sqrt(w)``. Most tests take a negligible one; one shows the identity.

And one thing is not free but inexact: optax computes ``1 - b2**t`` in float32, which for
b2 = 0.999 is off by 1.3e-5 at the first step. With 0.99 all else can be seen to 1e-5.
"""

import numpy as np
import optax
import pytest

import lowrank_optax as lro

REASON = "needs PyTorch, galore-torch and transformers: pip install lowrank-optax[conformance]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)
galore_torch = pytest.importorskip("galore_torch", reason=REASON)
from galore_torch.galore_projector import GaLoreProjector  # noqa: E402

pytestmark = pytest.mark.torch

RATE, SCALE, RANK, EVERY, B1, B2 = 0.01, 0.25, 4, 200, 0.9, 0.99
TINY = 1e-20


class AlignedProjector(GaLoreProjector):
    """galore_torch's projector, its singular vectors given the signs of other ones.

    Args:
        reference: ``(steps, side, rank)``, the basis that the other implementation has after
            each step.
    """

    def __init__(self, reference):
        super().__init__(RANK, update_proj_gap=EVERY, scale=SCALE, proj_type="std")
        self.reference = reference
        self.step = 0

    def project(self, full_rank_grad, iter):
        self.step = iter
        return super().project(full_rank_grad, iter)

    def get_orthogonal_matrix(self, weights, rank, type):
        theirs = super().get_orthogonal_matrix(weights, rank, type)
        columns = theirs.T if type == "right" else theirs
        ours = torch.tensor(self.reference[self.step])
        cosines = (columns * ours).sum(0)
        torch.testing.assert_close(cosines.abs(), torch.ones(rank), rtol=0, atol=1e-5)
        signs = torch.sign(cosines)
        return signs[:, None] * theirs if type == "right" else theirs * signs


def run_torch(grads, reference, start=None, eps=TINY, weight_decay=0.0):
    """The weight after each step of GaLoreAdamW, as its user would run it."""
    start = np.zeros(grads.shape[1:], np.float32) if start is None else start
    weight = torch.nn.Parameter(torch.tensor(start))
    projection = {"rank": RANK, "update_proj_gap": EVERY, "scale": SCALE, "proj_type": "std"}
    optimizer = galore_torch.GaLoreAdamW(
        [{"params": [weight]} | projection],
        lr=RATE,
        betas=(B1, B2),
        eps=eps,
        weight_decay=weight_decay,
        no_deprecation_warning=True,
    )
    optimizer.state[weight]["projector"] = AlignedProjector(reference)
    weights = []
    for grad in grads:
        weight.grad = torch.tensor(grad)
        optimizer.step()
        weights.append(weight.detach().numpy().copy())
    assert optimizer.state[weight]["step"] == len(grads)
    return np.stack(weights)


def galore_adamw(**options):
    options = {"moments": "keep", "eps": TINY} | options
    return lro.galore_adamw(RATE, RANK, EVERY, SCALE, B1, B2, method="svd", **options)


def galore_project(inner, targets=None):
    tracker = lro.refresh_basis(RANK, EVERY, method="svd", targets=targets)
    return lro.galore_project(inner, tracker, scale=SCALE, moments="keep")


def transposed(tree):
    return {name: np.ascontiguousarray(np.swapaxes(x, -1, -2)) for name, x in tree.items()}


def zeros_like(grads):
    # From zero, so that what is compared is movement with all its digits.
    return {name: np.zeros(x.shape[1:], np.float32) for name, x in grads.items()}


@pytest.fixture
def start(gradients):
    rng = np.random.default_rng(7)
    return {
        name: rng.standard_normal(x.shape[1:]).astype(np.float32) for name, x in gradients.items()
    }


def test_kernels_move_like_transposed_torch_weights(gradients, run, deviation):
    """A kernel (in, out) and a torch weight (out, in) of the same layer move alike."""
    ours = run(galore_adamw(), zeros_like(gradients), gradients)
    for name, grads in transposed(gradients).items():
        theirs = run_torch(grads, ours.bases[name])
        assert deviation(np.swapaxes(ours.params[name], -1, -2), theirs) < 1e-5, name


def test_weights_in_torch_layout_move_like_torch(gradients, run, deviation):
    """Weights (out, in), as ported models keep them, with a view that says so."""
    targets = [(".*", lro.Target(RANK, reduction_axis=1, output_axis=0))]
    tx = galore_project(optax.adam(RATE, B1, B2, eps=TINY), targets)
    ours = run(tx, zeros_like(gradients), gradients)
    for name, grads in gradients.items():
        theirs = run_torch(grads, ours.bases[name])
        assert deviation(ours.params[name], theirs) < 1e-5, name


def test_epsilon_before_bias_correction_is_a_schedule(gradients, run, deviation):
    """With eps / sqrt(1 - b2**t) in optax's place the two agree at an eps that matters."""
    eps = 0.01

    def their_eps(count):
        return eps / (1 - B2 ** (count + 1.0)) ** 0.5

    tx = galore_project(optax.inject_hyperparams(optax.adam)(RATE, B1, B2, eps=their_eps))
    ours = run(tx, zeros_like(gradients), gradients)
    for name, grads in transposed(gradients).items():
        theirs = run_torch(grads, ours.bases[name], eps=eps)
        assert deviation(np.swapaxes(ours.params[name], -1, -2), theirs) < 1e-5, name
        assert deviation(run_torch(grads, ours.bases[name]), theirs) > 1e-2, name


def test_rotated_moments_are_a_different_optimizer(gradients, run, deviation):
    """Our default is not galore_torch's: it differs from the second refresh on."""
    ours = run(galore_adamw(moments="rotate"), zeros_like(gradients), gradients)
    for name, grads in transposed(gradients).items():
        theirs = np.swapaxes(run_torch(grads, ours.bases[name]), -1, -2)
        assert deviation(ours.params[name][:EVERY], theirs[:EVERY]) < 1e-5, name
        assert deviation(ours.params[name], theirs) > 1e-3, name


def test_their_decay_takes_the_updated_weight(gradients, start, run):
    r"""One step from W: theirs minus ours is ``lr² λ u``, to the last digits.

    optax, like the AdamW paper: :math:`W - \eta(u + \lambda W)`. galore_torch decays what it has
    just updated: :math:`(1 - \eta\lambda)(W - \eta u)`.
    """
    decay = 10.0
    one_step = {name: x[:1] for name, x in gradients.items()}
    ours = run(galore_adamw(weight_decay=decay), start, one_step)
    for name, grads in transposed(one_step).items():
        first, basis = transposed(start)[name], ours.bases[name]
        movement = run_torch(grads, basis)  # -lr u, from zero
        theirs = run_torch(grads, basis, first, weight_decay=decay)
        difference = theirs - np.swapaxes(ours.params[name], -1, -2)
        expected = -RATE * decay * movement
        assert np.max(np.abs(expected)) > 1e-4
        np.testing.assert_allclose(difference, expected, rtol=0, atol=1e-6, err_msg=name)


def test_their_decay_is_ours_followed_by_a_shrinkage(gradients, start, run, deviation):
    """A stage that decays the updated weight makes whole trajectories with decay agree."""
    decay = 0.5

    def shrink(updates, params):
        return {k: u - RATE * decay * (params[k] + u) for k, u in updates.items()}

    inside = galore_project(optax.adam(RATE, B1, B2, eps=TINY))
    ours = run(optax.chain(inside, optax.stateless(shrink)), start, gradients)
    for name, grads in transposed(gradients).items():
        first = transposed(start)[name]
        theirs = run_torch(grads, ours.bases[name], first, weight_decay=decay)
        assert deviation(np.swapaxes(ours.params[name], -1, -2), theirs) < 1e-5, name
