"""quire/__init__.py: every public name loads, and importing costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import quire

HEAVY = ("torch", "numpy", "transformers", "zmq", "msgspec", "tokenizers", "fastapi", "jinja2", "quire.engine.client")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.parametrize("name", quire.__all__)
def test_every_public_name_loads(name):
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="Nonsense"):
        quire.Nonsense  # noqa: B018


def test_a_star_import_brings_everything():
    assert python("from quire import *; print(LLM.__name__, SamplingParams.__name__)") == "LLM SamplingParams"


def test_importing_imports_nothing_heavy():
    code = f"import quire, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


def test_the_control_side_never_imports_torch():
    names = "LLM, AsyncLLM, LLMEngine, EngineArgs, SamplingParams"
    assert python(f"import sys; from quire import {names}; print('torch' in sys.modules)") == "False"


def test_importing_is_quick():
    code = "import time; t = time.process_time(); import quire; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


def test_a_front_process_serves_without_torch(tmp_path):
    from tests.fake_engine import write_model

    folder = write_model(tmp_path)
    code = f"""
import asyncio, sys
import quire.engine.process_client as client
client.MAIN, client.EARLY = "tests.fake_engine:main", ""
from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model={folder!r}))
    async for out in engine.generate("abc", SamplingParams(max_tokens=3), "r"):
        pass
    engine.shutdown()
    print(out.outputs[0].text, "torch" in sys.modules)
asyncio.run(main())
"""
    began = time.monotonic()
    assert python(code) == "abc False"
    assert time.monotonic() - began < 120
