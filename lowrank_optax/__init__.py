"""Any optax optimizer, run inside a low-rank subspace of each weight's gradient."""

from lowrank_optax import targets as targets
from lowrank_optax._arrays.compact import Compact as Compact
from lowrank_optax._bases.learn import learn_basis as learn_basis
from lowrank_optax._bases.refresh import refresh_basis as refresh_basis
from lowrank_optax._bases.schedule import AdaptiveEvery as AdaptiveEvery
from lowrank_optax._bases.schedule import adaptive_every as adaptive_every
from lowrank_optax._bases.state import TrackerState as TrackerState
from lowrank_optax._inner.quantized import QuantizedState as QuantizedState
from lowrank_optax._inner.quantized import quantized_moments as quantized_moments
from lowrank_optax._matrix_free.activations import activation_basis as activation_basis
from lowrank_optax._matrix_free.report import CompactReport as CompactReport
from lowrank_optax._matrix_free.report import compact_report as compact_report
from lowrank_optax._matrix_free.value_and_grad import CompactBases as CompactBases
from lowrank_optax._matrix_free.value_and_grad import (
    compact_value_and_grad as compact_value_and_grad,
)
from lowrank_optax._memory.models import ModelShape as ModelShape
from lowrank_optax._memory.plan import MemoryPlan as MemoryPlan
from lowrank_optax._memory.plan import memory_plan as memory_plan
from lowrank_optax._migrate.migrate import migrate as migrate
from lowrank_optax._optimizers.apollo import apollo_adamw as apollo_adamw
from lowrank_optax._optimizers.apollo import apollo_lift as apollo_lift
from lowrank_optax._optimizers.fira import fira_adamw as fira_adamw
from lowrank_optax._optimizers.fira import fira_lift as fira_lift
from lowrank_optax._optimizers.galore import galore_adamw as galore_adamw
from lowrank_optax._optimizers.galore import galore_project as galore_project
from lowrank_optax._optimizers.ldadam import ErrorFeedbackState as ErrorFeedbackState
from lowrank_optax._optimizers.ldadam import error_feedback as error_feedback
from lowrank_optax._optimizers.ldadam import ldadamw as ldadamw
from lowrank_optax._optimizers.lion import LionMomentumState as LionMomentumState
from lowrank_optax._optimizers.lion import lion_momentum as lion_momentum
from lowrank_optax._optimizers.lion import sign_lift as sign_lift
from lowrank_optax._optimizers.logra import logra_adamw as logra_adamw
from lowrank_optax._optimizers.logra import logra_sketch as logra_sketch
from lowrank_optax._optimizers.lowrank import lowrank_adamw as lowrank_adamw
from lowrank_optax._optimizers.lowrank import sketched_residual_lift as sketched_residual_lift
from lowrank_optax._plan.target import Target as Target
from lowrank_optax._plan.view import Bases as Bases
from lowrank_optax._plan.view import View as View
from lowrank_optax._ranks.growth import RankGrowth as RankGrowth
from lowrank_optax._ranks.probe import LeafSpectrum as LeafSpectrum
from lowrank_optax._ranks.probe import RankProbe as RankProbe
from lowrank_optax._ranks.probe import rank_probe as rank_probe
from lowrank_optax._states.checkpoint import check_restorable as check_restorable
from lowrank_optax._states.describe import Description as Description
from lowrank_optax._states.describe import describe as describe
from lowrank_optax._states.shardings import state_shardings as state_shardings
from lowrank_optax._subspace.lift import Lift as Lift
from lowrank_optax._subspace.lift import LiftInput as LiftInput
from lowrank_optax._subspace.lift import subspace_lift as subspace_lift
from lowrank_optax._subspace.metrics import Fidelity as Fidelity
from lowrank_optax._subspace.metrics import Metrics as Metrics
from lowrank_optax._subspace.metrics import metrics as metrics
from lowrank_optax._subspace.state import SubspaceState as SubspaceState

__version__ = "0.1.0"
