"""A tool loop offline: the tools go into the template, the model's call is run, its result goes back."""

import json
import random
import string

from vllm import LLM
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager


def generate_random_id(length: int = 9) -> str:
    return "".join(random.choice(string.ascii_letters + string.digits) for _ in range(length))


def get_current_weather(city: str, state: str, unit: str) -> str:
    return f"It is 25 degrees in {city}, {state}."


TOOL_FUNCTIONS = {"get_current_weather": get_current_weather}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Dallas", "Austin"]},
        "state": {"type": "string", "enum": ["TX"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "state", "unit"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": PARAMETERS,
        },
    }
]


def main() -> None:
    llm = LLM(max_model_len=512)
    messages = [{"role": "user", "content": "What is the temperature in Dallas, in fahrenheit?"}]
    # a small model makes a call only where it is held to one
    tags = {
        "structures": [
            {
                "begin": '<tool_call>{"name": "get_current_weather", "arguments": ',
                "schema": PARAMETERS,
                "end": "}</tool_call>",
            }
        ],
        "triggers": ["<tool_call>"],
    }
    print("Tag:", bool(StructuredOutputsParams(structural_tag=json.dumps(tags)).structural_tag))
    held = StructuredOutputsParams(json=PARAMETERS)
    params = SamplingParams(max_tokens=100, temperature=0.0, structured_outputs=held)
    outputs = llm.chat(messages, sampling_params=params, tools=TOOLS)
    written = f'<tool_call>{{"name": "get_current_weather", "arguments": {outputs[0].outputs[0].text}}}</tool_call>'

    parser = ToolParserManager.get_tool_parser("hermes")(llm.get_tokenizer())
    found = parser.extract_tool_calls(written, request=None)
    print("Called:", found.tools_called)
    messages.append({"role": "assistant", "content": written})
    for call in found.tool_calls:
        answer = TOOL_FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        print("Result:", answer)
        messages.append({"role": "tool", "content": answer, "tool_call_id": generate_random_id()})
    outputs = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0.0), tools=TOOLS)
    print("Answer:", repr(outputs[0].outputs[0].text))


if __name__ == "__main__":
    main()
