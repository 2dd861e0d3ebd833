"""Strict JAX for every test: eight CPU devices, no silent promotion, shapes checked in calls.

Compiling is most of what the tests do, so LLVM optimises nothing.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in _flags:
    _flags = f"{_flags} --xla_force_host_platform_device_count=8"
if "backend_optimization_level" not in _flags:
    _flags = f"{_flags} --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = _flags.strip()

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
