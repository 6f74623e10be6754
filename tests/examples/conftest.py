"""The examples are scripts: their folder, not a package, is what they import each other from."""

import pathlib
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))


@pytest.fixture(scope="module")
def standard_promotion():
    """Optax and Orbax do not run under strict promotion, and scripts do not ask for it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """Runs of one program share its compilation, as they do for users who set the variable."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
