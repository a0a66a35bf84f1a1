"""Chat templates of models that are released without one, by architecture: how their own code writes a conversation."""

from __future__ import annotations

from typing import Any

_TEXT = (
    "{% set text %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{{ '\\n' }}{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endset %}"
)
_DEEPSEEK_VL2 = (
    "{{ bos_token }}{% for message in messages %}" + _TEXT + "{% if message.role == 'assistant' %}"
    "{{ '<|Assistant|>:' + text | trim + eos_token }}{% elif message.role == 'system' %}{{ text | trim + '\\n\\n' }}"
    "{% else %}{{ '<|User|>: ' + text | trim + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
_DEEPSEEK_OCR = "{{ bos_token }}{% for message in messages %}" + _TEXT + "{{ text | trim }}{% endfor %}"
_TEMPLATES = {
    "DeepseekVLV2ForCausalLM": _DEEPSEEK_VL2,
    **dict.fromkeys(("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"), _DEEPSEEK_OCR),
}


def known_template(architectures: Any) -> str | None:
    names = architectures if isinstance(architectures, list) else []
    return next((_TEMPLATES[name] for name in names if isinstance(name, str) and name in _TEMPLATES), None)
