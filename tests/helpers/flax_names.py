"""Names of Flax that have changed between the versions that go with old and new JAX."""

from flax import nnx

as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure
