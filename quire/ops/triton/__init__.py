"""Triton forms of the ops, for CUDA. Imported only if a worker runs on such a device."""
