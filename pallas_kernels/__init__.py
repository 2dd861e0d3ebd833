"""Paged-attention ops for JAX: contracts, references, an XLA path, and Mosaic GPU kernels.

Needs jax and numpy only, and nothing of jaxpaged.
"""
