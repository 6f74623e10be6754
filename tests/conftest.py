"""Settings that every test runs under."""

import os

# Before JAX starts: eight CPU devices, so that meshes can be tested on any machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    # Compiling is most of what the tests do.
    " --xla_backend_optimization_level=0"
)

from jaxtyping import install_import_hook

# Shapes and dtypes in annotations are checked at run time, before the package is imported.
install_import_hook("lowrank_optax", "beartype.beartype")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Compilation makes the first example slow; a deadline would only measure that.
hypothesis.settings.register_profile("lowrank", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("lowrank")
