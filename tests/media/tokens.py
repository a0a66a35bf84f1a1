"""A small tokenizer with the special tokens of every family, for Quire and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MOLMO = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<im_low>", "<frame_start>",
         "<frame_end>")  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<unk>", "<bos>", "<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<fake_token_around_image>",
    "<global-img>", "<end_of_utterance>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>",
    "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|audio|>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>",
    "<IMG_ROW>", "<IMG_END>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<audio_soft_token>", "<start_of_audio>", "<end_of_audio>",
    *MOLMO,
)  # fmt: skip
CORPUS = ["What is shown here?\n\nDescribe the image, then the next.\n", "USER: hello\nASSISTANT: a picture\n\n\n"] * 8


def write_tokenizer(folder: Path, **config: Any) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | config))
