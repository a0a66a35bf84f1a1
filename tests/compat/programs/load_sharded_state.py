"""Generates from a checkpoint that was written per rank."""

from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(load_format="sharded_state")
    parser.add_argument("--prompt", type=str, default="Hello, world!")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    llm = LLM(**asdict(engine_args))
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    for output in llm.generate(args.prompt, sampling_params):
        print(f"Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
