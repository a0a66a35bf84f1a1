"""A start imports what it uses. Each module costs 0.5 to 2 ms, three times as much without bytecode, in every process.

A number here may be raised for a module that a plain start does use; for one that it does not, import it lazily.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# Of features that are off: media, adapters, pooling, beams, drafts, ranks, several engines, quantized checkpoints,
# states, an engine apart.
UNUSED = {
    "quire.attention.cross", "quire.attention.state", "quire.drafting",
    "quire.engine.embeds", "quire.engine.encoder_inputs", "quire.engine.torch_tensor", "quire.sched.encoder_cache",
    "quire.layers.vector_places", "quire.loader.media", "quire.models.mrope", "quire.worker.media",
    "quire.engine.pooling", "quire.engine.proc", "quire.engine.process_client", "quire.engine.several",
    "quire.engine.shared_counts", "quire.observe.several", "quire.sched.router",
    "quire.hf_models",
    "quire.layers.adapters", "quire.layers.audio_stem", "quire.layers.packed", "quire.layers.places",
    "quire.layers.relative",
    "quire.llm.beam", "quire.llm.beam_calls", "quire.llm.pooling", "quire.llm.scoring",
    "quire.loader.adapter", "quire.loader.coded_stage", "quire.loader.coded_storage", "quire.loader.dense",
    "quire.loader.dummy", "quire.loader.formats.awq", "quire.loader.formats.compressed",
    "quire.loader.formats.expected", "quire.loader.mistral_names", "quire.loader.online", "quire.loader.sharded",
    "quire.models.encoder", "quire.models.heads", "quire.models.pooled", "quire.models.seq2seq",
    "quire.ops.coded_experts", "quire.ops.mx_experts", "quire.quant.coded_experts", "quire.quant.coded_scheme",
    "quire.quant.device_codes", "quire.worker.adapters", "quire.worker.lora", "quire.worker.pooling_results",
    "quire.worker.pooling_runner", "quire.worker.draft_setup", "quire.worker.ranks",
    "jinja2", "transformers", "zmq",
}  # fmt: skip
OFFLINE = "from quire import LLM; llm = LLM(device='cpu', max_model_len=256, max_num_seqs=2)"
ENGINE = "import quire.engine.proc, quire.worker.main"  # what an engine process imports before it has a configuration
API = "import quire.cli.serve, quire.server.launch, quire.server.host"
OF_ENGINES = {"quire.engine.proc", "quire.engine.process_client", "zmq"}
OF_SEVERAL = {"quire.engine.several", "quire.observe.several", "quire.sched.router"}
OF_WORKERS = {"torch", "transformers", "jinja2", "quire.worker", "quire.engine.start", "quire.sched.scheduler"}


LONGEST_S = 300  # of a start on a busy machine


def printed(code: str) -> list[str]:
    """The words after 'modules' that a fresh interpreter prints. One that hangs, even at its end, says where."""
    watched = f"import faulthandler; faulthandler.dump_traceback_later({LONGEST_S}, exit=True)\n{code}"
    command = [sys.executable, "-c", watched]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LONGEST_S - 60)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("modules")]
    return line.split()[1:]


def modules_after(code: str) -> set[str]:
    return set(printed(f"{code}\nimport sys; print('modules', *sys.modules)"))


@pytest.mark.parametrize(
    ("code", "unused", "most"),
    [
        pytest.param(OFFLINE, UNUSED, 258, id="LLM"),
        pytest.param(ENGINE, UNUSED - OF_ENGINES, 209, id="engine process"),
        pytest.param(API, OF_WORKERS | OF_SEVERAL, 187, id="API process"),
    ],
)
def test_a_start_imports_what_it_uses(code: str, unused: set[str], most: int) -> None:
    modules = modules_after(code)
    assert sorted(modules & unused) == []
    ours = {name for name in modules if name.partition(".")[0] == "quire"}
    assert len(ours) <= most, f"{len(ours)} modules of Quire are imported; {most} were enough"


def test_the_list_names_modules_that_exist() -> None:
    named = [name for name in sorted(UNUSED) if name.startswith("quire.")]
    code = f"import importlib.util as u; print('modules', *[n for n in {named} if u.find_spec(n) is None])"
    assert printed(code) == []
