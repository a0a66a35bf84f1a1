"""OpenAI's clients transcribe and translate a file: whole, and as a stream."""

import argparse
import asyncio

from openai import AsyncOpenAI, OpenAI


def sync_openai(path: str, client: OpenAI, model: str) -> None:
    with open(path, "rb") as file:
        transcription = client.audio.transcriptions.create(
            file=file, model=model, language="en", response_format="json", temperature=0.0,
            extra_body={"seed": 4419, "repetition_penalty": 1.0, "max_completion_tokens": 8},
        )  # fmt: skip
        print(f"Transcription: {transcription.text!r}")
    with open(path, "rb") as file:
        translation = client.audio.translations.create(
            file=file,
            model=model,
            response_format="json",
            temperature=0.0,
            extra_body={"language": "de", "max_completion_tokens": 8},
        )
        print(f"Translation: {translation.text!r}")


async def stream_openai_response(path: str, client: AsyncOpenAI, model: str) -> None:
    text = ""
    with open(path, "rb") as file:
        chunks = await client.audio.transcriptions.create(
            file=file, model=model, language="en", response_format="json", temperature=0.0,
            extra_body={"seed": 420, "max_completion_tokens": 8}, stream=True,
        )  # fmt: skip
        async for chunk in chunks:
            if chunk.choices:
                text += chunk.choices[0].get("delta", {}).get("content") or ""
    print(f"Streamed: {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Transcription")
    parser.add_argument("--audio-path", required=True)
    parser.add_argument("--base-url", required=True)
    args = parser.parse_args()
    client = OpenAI(api_key="EMPTY", base_url=args.base_url)
    model = client.models.list().data[0].id
    sync_openai(args.audio_path, client, model)
    asyncio.run(stream_openai_response(args.audio_path, AsyncOpenAI(api_key="EMPTY", base_url=args.base_url), model))


if __name__ == "__main__":
    main()
