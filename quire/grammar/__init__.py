"""Which tokens may come next: constraints on a request's text, compiled off the step's path, as rows of bits.

`request.py` checks and normalises what a caller asked, `choose.py` names the backends that can do it, `compiler.py`
compiles in child processes that may be killed, `masks.py` follows every request and fills its row between a step's
forward and its sample. Must not know: how masks are applied, text, HTTP, torch.
"""
