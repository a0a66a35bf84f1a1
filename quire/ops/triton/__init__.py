"""Triton forms of the ops, for CUDA. Nothing here is imported unless a worker runs on such a device."""
