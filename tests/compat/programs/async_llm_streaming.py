"""Text as it comes, from an engine in a process of its own."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    print(f"Prompt: {prompt!r}")
    sampling_params = SamplingParams(
        max_tokens=24, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    try:
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            for completion in output.outputs:
                new_text = completion.text
                if new_text:
                    print(f"Delta: {new_text!r}", flush=True)
            if output.finished:
                print("Finished")
                break
    except Exception as e:
        print(f"Error during streaming: {e}")
        raise


async def main() -> None:
    engine_args = AsyncEngineArgs(model=sys.argv[1], enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is"]
        for i, prompt in enumerate(prompts, 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
            if i < len(prompts):
                await asyncio.sleep(0.05)
    finally:
        engine.shutdown()
        print("Shut down")


if __name__ == "__main__":
    asyncio.run(main())
