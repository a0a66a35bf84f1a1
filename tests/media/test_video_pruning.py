"""Vectors that are left out of a video: which ones, and what the model says of the others, beside transformers, given
the same vectors at the places that they have in the whole video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media import pixels
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.media import KEPT
from tests.media.test_joined import FRAMES, write_model
from tests.media.tokens import SPECIAL

NUM = 6


def test_what_changes_least_is_left_out() -> None:
    """A square that moves over noise."""
    noise = np.random.default_rng(1).integers(0, 200, (3, 32, 48), np.uint8)
    frames = np.stack([noise] * 7)  # four pairs, of which the last frame is its own
    frames[2:4, :, 0:16, 16:32] += 40  # appears in the second pair, in row 0, column 1 of squares of 16 pixels
    frames[4:, :, 16:32, 32:48] += 20  # in the third, in row 1, column 2, while the other is gone
    kept = pixels.least_changed(frames, 16, 2, 0.5)
    first, second, third = list(range(6)), 6 + 1, [12 + 1, 12 + 5]
    assert {*first, second, *third} <= set(kept.tolist()) and len(kept) == 12
    assert pixels.least_changed(frames, 16, 2, 0.625).tolist() == [*first, second, *third]
    assert pixels.least_changed(frames, 16, 2, 0.7).tolist() == [*first, second]
    assert pixels.least_changed(frames, 16, 2, 0.99).tolist() == first  # the first pair is whole
    assert pixels.least_changed(frames, 16, 2, 0.0).tolist() == list(range(24))
    assert pixels.least_changed(frames[:1], 16, 2, 0.9).tolist() == first


LARGE = {"mm_processor_kwargs": {"min_pixels": 28 * 28 * 20, "max_pixels": 28 * 28 * 4000}}


@pytest.mark.parametrize(
    ("name", "rate", "size"),
    [("qwen2 vl, video", 0.4, {}), ("qwen2 vl, video", 0.9, {}), ("qwen2 vl, video", 0.4, LARGE)],
    ids=["0.4", "0.9", "large"],
)
def test_answers_equal_transformers(name: str, rate: float, size: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(name, tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [vocab.token_to_id(one) for one in SPECIAL]
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    video = [*FRAMES, FRAMES[-1], *FRAMES[:2]]
    text = "USER: <|vision_start|><|video_pad|><|vision_end|>\nWhat is shown?"
    prompt = {"prompt": text, "multi_modal_data": {"video": video}}
    options: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=2, block_size=16, **size)
    with LLM(str(tmp_path), **options, video_pruning_rate=rate) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        arrays = media.loaded(media.load({"video": video})).items["video"][0].item.arrays
        llm.reset_prefix_cache()
        (again,) = llm.generate([{**prompt, "prompt": text}], params, use_tqdm=False)  # its vectors are known
    with LLM(str(tmp_path), **options, video_pruning_rate=rate, max_num_batched_tokens=16) as llm:
        (chunked,) = llm.generate(prompt, params, use_tqdm=False)
    with LLM(str(tmp_path), **options) as llm:
        (whole,) = llm.generate(prompt, params, use_tqdm=False)
    kept, pad = arrays[KEPT].tolist(), vocab.token_to_id("<|video_pad|>")
    total = whole.prompt_token_ids.count(pad)
    assert not size or len(kept) > 32  # what a worker is told of an item is small, but for this
    grid = arrays["video_grid_thw"][0].tolist()
    assert len(kept) == output.prompt_token_ids.count(pad) == max(total // grid[0], int(total * (1 - rate))) < total
    expected = answered(model, whole.prompt_token_ids, arrays, pad, kept, special)
    for found in (output, again, chunked):
        assert found.outputs[0].token_ids == expected
    assert whole.outputs[0].token_ids == answered(model, whole.prompt_token_ids, arrays, pad, range(total), special)


@torch.no_grad()
def answered(model: Any, ids: list[int], arrays: Any, pad: int, kept: Any, special: list[int]) -> list[int]:
    """Greedy, from embeddings and positions of the whole video of which some places are taken out."""
    tokens = torch.tensor([ids])
    is_video = tokens[0] == pad
    grid = torch.from_numpy(np.array(arrays["video_grid_thw"]))
    positions, _ = model.model.get_rope_index(
        tokens, video_grid_thw=grid, mm_token_type_ids=is_video[None].int() * 2, attention_mask=torch.ones_like(tokens)
    )
    vectors = model.model.get_video_features(torch.from_numpy(np.array(arrays["pixel_values_videos"])), grid)
    vectors = vectors.pooler_output if hasattr(vectors, "pooler_output") else vectors
    embeds = model.get_input_embeddings()(tokens)
    embeds[0, is_video] = torch.cat(list(vectors))
    stays = ~is_video
    stays[torch.nonzero(is_video)[:, 0][torch.tensor(list(kept))]] = True
    embeds, positions = embeds[:, stays], positions[:, :, stays]
    said: list[int] = []
    last = int(positions.max())
    for _ in range(NUM):
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        logits = model.lm_head(hidden[0, -1])
        logits[special] = -torch.inf
        said.append(int(logits.argmax()))
        last += 1
        embeds = torch.cat((embeds, model.get_input_embeddings()(torch.tensor([[said[-1]]]))), 1)
        positions = torch.cat((positions, torch.full_like(positions[:, :, :1], last)), -1)
    return said


def test_other_models_refuse_it(tmp_path: Path) -> None:
    write_model("internvl", tmp_path)
    with pytest.raises(NotBuiltError, match="not built for InternVLForConditionalGeneration"):
        LLM(str(tmp_path), video_pruning_rate=0.5)
    with pytest.raises(ConfigError, match="video_pruning_rate must be"):
        LLM(str(tmp_path), video_pruning_rate=1.0)
