"""An agent: the model calls functions until it needs no more, or has had its turns.

    pip install openai
    quire serve --enable-auto-tool-choice --tool-call-parser hermes         # in another terminal
    python examples/agent.py "How many letters are in the name of the moon of the earth?"

The functions are those of this file: none takes anything but what its schema says, and a call that is wrong is answered
with the error, so that the model can try again.
"""

import argparse
import inspect
import json

from openai import OpenAI

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def add(a: float, b: float) -> float:
    """The sum of two numbers."""
    return a + b


def count_letters(text: str) -> int:
    """How many letters a text has."""
    return sum(letter.isalpha() for letter in text)


FUNCTIONS = {function.__name__: function for function in (add, count_letters)}


def described(function) -> dict[str, object]:
    """A function as the API wants it, from its signature."""
    names = inspect.signature(function).parameters
    properties = {name: {"type": TYPES[one.annotation]} for name, one in names.items()}
    parameters = {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
    about = {"name": function.__name__, "description": function.__doc__, "parameters": parameters}
    return {"type": "function", "function": about}


def called(call) -> str:
    """The result of a call, or what is wrong with it."""
    try:
        return json.dumps(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
    except (KeyError, TypeError, ValueError) as wrong:
        return f"error: {wrong!r}"


parser = argparse.ArgumentParser()
parser.add_argument("question", nargs="?", default="How many letters are in the word 'engine'?")
parser.add_argument("--url", default="http://localhost:8000/v1")
parser.add_argument("--turns", type=int, default=4)
args = parser.parse_args()
client = OpenAI(base_url=args.url, api_key="none")
model = client.models.list().data[0].id

tools = [described(function) for function in FUNCTIONS.values()]
messages = [{"role": "user", "content": args.question}]
for turn in range(args.turns):
    # A small model rarely calls by itself: the first turn asks for a call, later ones leave it to the model.
    choice = "required" if turn == 0 else "none" if turn == args.turns - 1 else "auto"
    said = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice=choice, temperature=0, max_tokens=60
    )
    message = said.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(f"answer after {turn + 1} turns: {message.content}")
        break
    for call in message.tool_calls:
        result = called(call)
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
