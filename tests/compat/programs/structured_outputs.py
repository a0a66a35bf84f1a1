"""Answers held to a choice, a regular expression, a schema and a grammar, offline."""

from enum import Enum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 50

GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


class CarType(str, Enum):  # noqa: UP042  as programs write it
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"
    coupe = "Coupe"


class CarDescription(BaseModel):
    brand: str
    car_type: CarType


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM) -> str:
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


def main() -> None:
    llm = LLM(max_model_len=256)
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    print(
        "Choice:",
        generate_output("Classify this sentiment: vLLM is wonderful!", SamplingParams(structured_outputs=choice), llm),
    )

    regex = StructuredOutputsParams(regex=r"\w+@\w+\.com\n")
    params = SamplingParams(structured_outputs=regex, stop=["\n"], max_tokens=MAX_TOKENS)
    print("Regex:", generate_output("An email address for Alan Turing, who works in Enigma: ", params, llm))

    json = StructuredOutputsParams(json=CarDescription.model_json_schema(), disable_any_whitespace=True)
    params = SamplingParams(structured_outputs=json, max_tokens=MAX_TOKENS, temperature=0)
    print("JSON:", generate_output("A JSON with the brand and car_type of an iconic car: ", params, llm))

    grammar = StructuredOutputsParams(grammar=GRAMMAR)
    params = SamplingParams(structured_outputs=grammar, max_tokens=MAX_TOKENS)
    print("Grammar:", generate_output("An SQL query for the users: ", params, llm))


if __name__ == "__main__":
    main()
