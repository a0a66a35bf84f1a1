"""MiniCPM-V up to 4.5 and MiniCPM-o: a language model of another family under names of its own, and its numbers at
the top of the configuration."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.minicpm import release_of
from quire.models.arch import Arch
from quire.models.view import View
from quire.models.zoo.defaults import DEFAULTS

_LANGUAGE = {
    "2.5": "LlamaForCausalLM",
    "2.6": "Qwen2ForCausalLM",
    "4.0": "LlamaForCausalLM",
    "4.5": "Qwen3ForCausalLM",
}
_NAMES = ((r"^llm\.", ""),)
_TOWER = r"^(?:vpm|resampler|apm|audio_projection_layer)\."
_SPEECH = r"^tts\."  # what it says aloud is not built


def minicpmv(c: View) -> Arch:
    from quire.models.zoo import ZOO  # lazy: the table whose entry leads here

    name = _LANGUAGE[release_of(c.raw)]
    arch: Arch = ZOO.get(name)(View(c.raw, DEFAULTS.get(name, {}), name))
    return replace(arch, names=(*_NAMES, *arch.names), ignore=(*arch.ignore, _TOWER, _SPEECH))
