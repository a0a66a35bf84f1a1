"""A model of scale: the real scheduler, prefix cache and router under a virtual clock and a cost model."""
