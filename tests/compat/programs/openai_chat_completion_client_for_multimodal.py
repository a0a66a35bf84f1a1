"""OpenAI's client sends images, video and audio to a server: as URLs, as base64, one and several."""

import base64
import sys

from openai import OpenAI
from vllm.utils.argparse_utils import FlexibleArgumentParser


def encode_base64_content(path: str) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(file.read()).decode("utf-8")


def ask(client: OpenAI, model: str, content: list[dict]) -> str:
    completion = client.chat.completions.create(
        messages=[{"role": "user", "content": content}], model=model, max_completion_tokens=8, temperature=0.0
    )
    return completion.choices[0].message.content


def run_text_only(client: OpenAI, model: str, path: str) -> None:
    print(f"Text: {ask(client, model, 'What is the capital of France?')!r}")


def run_single_image(client: OpenAI, model: str, path: str) -> None:
    text = {"type": "text", "text": "What's in this image?"}
    url = {"type": "image_url", "image_url": {"url": f"file://{path}"}}
    print(f"From URL: {ask(client, model, [text, url])!r}")
    data = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode_base64_content(path)}"}}
    print(f"From base64: {ask(client, model, [text, data])!r}")


def run_multi_image(client: OpenAI, model: str, path: str) -> None:
    image = {"type": "image_url", "image_url": {"url": f"file://{path}"}}
    print(f"Two: {ask(client, model, [{'type': 'text', 'text': 'What are these?'}, image, image])!r}")


def run_video(client: OpenAI, model: str, path: str) -> None:
    text = {"type": "text", "text": "What's in this video?"}
    url = {"type": "video_url", "video_url": {"url": f"file://{path}"}}
    print(f"From URL: {ask(client, model, [text, url])!r}")
    data = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encode_base64_content(path)}"}}
    print(f"From base64: {ask(client, model, [text, data])!r}")


def run_audio(client: OpenAI, model: str, path: str) -> None:
    text, data = {"type": "text", "text": "What's in this audio?"}, encode_base64_content(path)
    own = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    print(f"From input_audio: {ask(client, model, [text, own])!r}")
    url = {"type": "audio_url", "audio_url": {"url": f"file://{path}"}}
    print(f"From URL: {ask(client, model, [text, url])!r}")
    inline = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    print(f"From base64: {ask(client, model, [text, inline])!r}")


example_function_map = {
    "text-only": run_text_only,
    "single-image": run_single_image,
    "multi-image": run_multi_image,
    "video": run_video,
    "audio": run_audio,
}


def main() -> None:
    parser = FlexibleArgumentParser(description="Media through OpenAI's client")
    parser.add_argument("--chat-type", "-c", choices=list(example_function_map), default="single-image")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--path", required=True)
    args = parser.parse_args()
    client = OpenAI(api_key="EMPTY", base_url=args.base_url)
    example_function_map[args.chat_type](client, client.models.list().data[0].id, args.path)


if __name__ == "__main__":
    sys.exit(main())
