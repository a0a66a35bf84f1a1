"""Florence-2: one image before a text, or before the question that the name of a task stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media import pixels
from quire.media.families.base import BICUBIC, Family, ProcessedItem
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_DEFAULTS = {
    "do_resize": True, "size": {"height": 768, "width": 768}, "resample": BICUBIC, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225], "do_center_crop": False, "do_convert_rgb": True, "image_seq_length": 577,
}  # fmt: skip
# the model was trained with these questions, and programs write the names
_ALONE = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
_WITH_WORDS = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}


class Florence2(Family):
    placeholders = {"image": "<image>"}
    most_items = {"image": 1}
    fixed = ("size", "do_resize")

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.image = self.settings("image", _DEFAULTS, "crop_size")
        self.num = self.image.whole("image_seq_length", high=1 << 16)

    def lay_out(self, text: str) -> str:
        return f"{self.placeholders['image']}<s>{question_of(text.replace(self.placeholders['image'], ''))}</s>"

    def process(self, modality: str, value: Image, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality != "image":
            raise self.refuse(modality)
        settings = self.image.over(options)
        if settings.flag("do_resize", True):
            value = pixels.resize(value, settings.box("size"), settings.filter(BICUBIC))
        array = settings.levels().apply(pixels.planes(value))
        return ProcessedItem({"pixel_values": array[None]}, self.placeholders["image"] * self.num, self.num)


def question_of(text: str) -> str:
    for name, question in _ALONE.items():
        if name in text:
            if text != name:
                raise InputError(f"the task {name} takes no further words, and the prompt has some", param="prompt")
            return question
    for name, question in _WITH_WORDS.items():
        if name in text:
            return question.replace("{}", text.replace(name, "").strip())
    return text
