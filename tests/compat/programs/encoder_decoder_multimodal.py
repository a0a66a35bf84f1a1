"""Whisper, with an implicit prompt and with one for encoder and decoder each; arguments from EngineArgs."""

import os
import sys
import time
import wave
from dataclasses import asdict

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

import numpy as np
from vllm import LLM, EngineArgs, PromptType, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def read_audio(path: str) -> tuple[np.ndarray, int]:
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return samples.astype(np.float32) / 32768, file.getframerate()


def prompts_of(path: str) -> list[PromptType]:
    audio = read_audio(path)
    begin = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    return [
        {"prompt": begin, "multi_modal_data": {"audio": audio}},
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}},
            "decoder_prompt": begin,
        },
    ]


def main() -> None:
    parser = FlexibleArgumentParser(description="Encoder and decoder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--audio", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine_args = EngineArgs(model=args.model, max_num_seqs=16, limit_mm_per_prompt={"audio": 1}, dtype="float")
    llm = LLM(**asdict(engine_args) | {"seed": args.seed})
    params = SamplingParams(temperature=0, top_p=1.0, max_tokens=8, skip_special_tokens=False)
    start = time.time()
    for output in llm.generate(prompts_of(args.audio), params):
        print(f"Decoder prompt: {output.prompt!r}")
        print(f"Generated text: {output.outputs[0].text!r}")
    print(f"Duration: {time.time() - start:.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
