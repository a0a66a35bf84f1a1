"""Answers held to a form: a JSON schema, one of several strings, a regular expression.

pip install "quire-llm[structured]"      # into an environment that has Quire
python examples/structured.py
"""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(max_model_len=1024)
schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "country", "inhabitants"],
    "additionalProperties": False,
}
forms = {
    "a city": StructuredOutputsParams(json=schema, disable_any_whitespace=True),
    "a mood": StructuredOutputsParams(choice=["cheerful", "sad", "angry"]),
    "a date": StructuredOutputsParams(regex=r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d)"),
}
prompts = ["A large city, as JSON: ", "'What a lovely morning!' sounds ", "The moon landing was on "]
params = [SamplingParams(temperature=0, max_tokens=80, structured_outputs=form) for form in forms.values()]
for name, output in zip(forms, llm.generate(prompts, params, use_tqdm=False), strict=True):
    print(f"{name}: {output.outputs[0].text}")
    if name == "a city":
        assert set(json.loads(output.outputs[0].text)) == set(schema["required"])
