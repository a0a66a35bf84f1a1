"""lazy: the one way to import heavy or optional code when it is first needed instead of at the top of a module.

    @lazy
    def _detokenizer() -> type[Detokenizer]:
        from quire.text.detokenize import Detokenizer

        return Detokenizer

Type checkers and the import contract follow such an import like any other. No other function may hold an import (a test
checks it); plug-ins, which are named by strings, are base/registry.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

Imported = TypeVar("Imported")


def lazy(imports: Callable[[], Imported]) -> Callable[[], Imported]:
    """Decorates a function that imports something and returns it: the import runs at the first call."""
    return functools.cache(imports)
