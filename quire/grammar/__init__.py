"""Which tokens may come next: constraints on a request's text, compiled outside of steps, as bitmasks.

`request.py` validates and normalizes a constraint, `choose.py` selects the backends that support it, `compiler.py`
compiles in child processes that may be killed, `masks.py` tracks every request and fills its row between a step's
forward and its sampling. Must not know: how masks are applied, text, HTTP, torch.
"""
