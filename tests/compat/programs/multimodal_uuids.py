"""Two images with names of their own, then the same names without the images; then a name that nobody has sent."""

import sys

from PIL import Image
from vllm import LLM, SamplingParams

prompt = "USER: <image>\n<image>\nWhat differs?\nASSISTANT:"
params = SamplingParams(temperature=0.0, max_tokens=6)


def main() -> None:
    llm = LLM(model=sys.argv[1], max_model_len=256, limit_mm_per_prompt={"image": 2}, mm_processor_cache_gb=1)
    first, second = (Image.new("RGB", (48, 40), colour) for colour in ("red", "blue"))
    texts = []
    for images in ([first, second], [None, None]):
        request = {
            "prompt": prompt,
            "multi_modal_data": {"image": images},
            "multi_modal_uuids": {"image": ["sku-1234-a", "sku-1234-b"]},
        }
        (output,) = llm.generate(request, params)
        texts.append(output.outputs[0].text)
    print(f"Same: {texts[0] == texts[1] and bool(texts[0])!r}")
    try:
        llm.generate({**request, "multi_modal_uuids": {"image": ["sku-1234-a", "sku-9"]}}, params)
    except ValueError as wrong:
        print(f"Unknown: {'sku-9' in str(wrong)!r}")


if __name__ == "__main__":
    main()
