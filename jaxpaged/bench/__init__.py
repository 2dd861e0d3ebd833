"""Measurements of the kernels, the step, whole workloads, the start and the server."""
