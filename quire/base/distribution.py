"""Under which name this program is installed, and the command that adds packages to it: every remedy reads these.

The import and the command are `quire`; the distribution is not, because that name belongs to another project on the
package index. The command works wherever Quire came from, a checkout or a wheel: pip finds the distribution installed
and adds what the extra asks for. Must not know: which feature needs which extra.
"""

from __future__ import annotations

NAME = "quire-llm"
DEFAULT_MODEL = "quire pull default"  # fetches the small embedded model


def install(extra: str) -> str:
    """What to run for the packages of an extra."""
    return f'pip install "{NAME}[{extra}]"'
