"""One function that the model calls, over a server: what it asks for, and the answer made of the result.

pip install openai
quire serve --enable-auto-tool-choice --tool-call-parser hermes         # in another terminal
python examples/tools.py                                                # --url names another server
"""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://localhost:8000/v1")
client = OpenAI(base_url=parser.parse_args().url, api_key="none")
model = client.models.list().data[0].id


def weather(city: str, unit: str) -> dict[str, object]:
    """Stands for a service that knows."""
    return {"city": city, "degrees": 21 if unit == "celsius" else 70, "sky": "clear"}


unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": unit},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
tools = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather in a city, now.", "parameters": parameters},
    }
]
messages = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]

# "required": some call must come, and its arguments fit the schema. "auto" leaves it to the model.
asked = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", temperature=0, max_tokens=100
)
call = asked.choices[0].message.tool_calls[0]
result = weather(**json.loads(call.function.arguments))
print(f"{call.function.name}({call.function.arguments}) -> {result}")

messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
print(answer.choices[0].message.content)
