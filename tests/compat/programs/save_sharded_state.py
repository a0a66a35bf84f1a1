"""Writes a model's weights as its workers hold them, one checkpoint per rank, and copies the files beside them."""

import dataclasses
import os
import shutil
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--output", "-o", required=True, type=str)
    parser.add_argument("--file-pattern", type=str, default=ShardedStateLoader.DEFAULT_PATTERN)
    parser.add_argument("--max-file-size", type=int, default=5 * 1024**3)
    return parser.parse_args()


def main(args) -> None:
    engine_args = EngineArgs.from_cli_args(args)
    if not Path(engine_args.model).is_dir():
        raise ValueError("the model must be a folder")
    llm = LLM(**dataclasses.asdict(engine_args))
    Path(args.output).mkdir(exist_ok=True)
    llm.llm_engine.engine_core.save_sharded_state(
        path=args.output, pattern=args.file_pattern, max_size=args.max_file_size
    )
    for file in os.listdir(engine_args.model):
        if os.path.splitext(file)[1] not in (".bin", ".pt", ".safetensors"):
            shutil.copy(os.path.join(engine_args.model, file), args.output)


if __name__ == "__main__":
    main(parse_args())
