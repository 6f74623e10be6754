"""Any optax optimizer, run inside a low-rank subspace of each weight's gradient."""

from lowrank_optax import targets as targets
from lowrank_optax._activations import activation_basis as activation_basis
from lowrank_optax._aliases import galore_adamw as galore_adamw
from lowrank_optax._aliases import logra_adamw as logra_adamw
from lowrank_optax._compact import CompactBases as CompactBases
from lowrank_optax._compact import compact_value_and_grad as compact_value_and_grad
from lowrank_optax._compact_report import CompactReport as CompactReport
from lowrank_optax._compact_report import compact_report as compact_report
from lowrank_optax._describe import Description as Description
from lowrank_optax._describe import describe as describe
from lowrank_optax._galore import galore_project as galore_project
from lowrank_optax._learn import learn_basis as learn_basis
from lowrank_optax._lift import Lift as Lift
from lowrank_optax._lift import LiftInput as LiftInput
from lowrank_optax._lift import subspace_lift as subspace_lift
from lowrank_optax._metrics import Fidelity as Fidelity
from lowrank_optax._metrics import Metrics as Metrics
from lowrank_optax._metrics import metrics as metrics
from lowrank_optax._migrate import migrate as migrate
from lowrank_optax._rank_growth import RankGrowth as RankGrowth
from lowrank_optax._rank_probe import LeafSpectrum as LeafSpectrum
from lowrank_optax._rank_probe import RankProbe as RankProbe
from lowrank_optax._rank_probe import rank_probe as rank_probe
from lowrank_optax._refresh import refresh_basis as refresh_basis
from lowrank_optax._sketch import logra_sketch as logra_sketch
from lowrank_optax._state import SubspaceState as SubspaceState
from lowrank_optax._state import TrackerState as TrackerState
from lowrank_optax._target import Target as Target
from lowrank_optax._tree import Compact as Compact
from lowrank_optax._view import Bases as Bases
from lowrank_optax._view import View as View

__version__ = "0.1.0"
