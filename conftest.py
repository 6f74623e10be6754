"""Settings that every test runs under."""

import importlib.metadata
import os

# Before JAX starts. Eight CPU devices, so that meshes can be tested on any machine; and little
# optimization, since compiling is most of what the tests do.
flags = [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# OpenBLAS's threads wait by spinning, which on a busy machine costs more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from jaxtyping import install_import_hook

# Shapes and dtypes in annotations are checked at run time, before the package is imported.
install_import_hook("lowrank_optax", "beartype.beartype")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Compilation makes the first example slow; a deadline would only measure that.
hypothesis.settings.register_profile("lowrank", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("lowrank")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_of_one_module():
    """Forgets compiled programs: a process can map only so many, and XLA crashes beyond that."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _promotion_of_doctests(request: pytest.FixtureRequest):
    """Examples run as users run them; optax's Adam does not under strict promotion."""
    if type(request.node).__name__ != "DoctestItem":
        yield
        return
    with jax.numpy_dtype_promotion("standard"):
        yield
