"""Ultravox from samples to tokens, and checkpoints that name their language model and their Whisper instead of having
them. Chunks, prefixes and preemption are in test_media_models.py."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.schema.errors import CheckpointError, InputError, ModelNotFoundError, NotBuiltError
from tests.media_models import make_model
from tests.tiny_models import write_tokenizer
from tests.ultravox_model import AUDIO, BINS, FRAMES, STACK

TOKEN = 0  # <pad>, which no text has
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={TOKEN: -100.0})
OPTIONS: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=4, block_size=16)


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)


def clip_of(samples: np.ndarray) -> dict[str, torch.Tensor]:
    """By transformers' extractor: silence up to whole frames, then cut into pieces."""
    extractor = tf.WhisperFeatureExtractor(feature_size=BINS)
    samples = np.pad(samples, (0, max(0, 320 - len(samples))))  # it takes no less
    made = extractor(samples, sampling_rate=16000, padding="longest", pad_to_multiple_of=160, truncation=False,
                     return_attention_mask=True, return_tensors="pt")  # fmt: skip
    (features,), num = made["input_features"], int(made["attention_mask"].sum())
    pieces = [features[:, at : at + FRAMES] for at in range(0, num, FRAMES)]
    lens = [piece.shape[1] for piece in pieces]
    padded = [torch.nn.functional.pad(piece, (0, lens[0] - piece.shape[1])) for piece in pieces]
    return {"input_features": torch.stack(padded), "piece_lens": torch.tensor(lens)}


def is_greedy(model: Any, ids: list[int], clips: list[dict[str, torch.Tensor]], answer: list[int]) -> bool:
    with torch.inference_mode():
        logits = model(torch.tensor([ids + answer]), clips, TOKEN).logits[0].clone()
        logits[:, TOKEN] = -torch.inf
    return logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer


def answer_of(llm: LLM, model: Any, samples: list[np.ndarray]) -> list[int]:
    """Whose tokens are those of the oracle."""
    prompt = "one <|audio|> and two <|audio|>." if len(samples) == 2 else "Say <|audio|> now"
    media = {"audio": [(one, 16000) for one in samples]}
    (output,) = llm.generate({"prompt": prompt, "multi_modal_data": media}, GREEDY, use_tqdm=False)
    clips = [clip_of(one) for one in samples]
    counts = [sum(-(-int(num) // (2 * STACK)) for num in clip["piece_lens"]) for clip in clips]
    ids = list(output.prompt_token_ids or ())
    assert ids.count(TOKEN) == sum(counts)
    answer = list(output.outputs[0].token_ids)
    assert is_greedy(model, ids, clips, answer)
    return answer


def test_samples_become_the_tokens_of_the_oracle(tmp_path: Path) -> None:
    """A short one, one of three pieces, and both in a prompt."""
    model = make_model("UltravoxModel", tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.llm_engine.model_config.facts.hidden_size == 64  # not the projector's
    several = [[sound(0.5)], [sound(1.7, 1)], [sound(0.31, 2), sound(1.7, 1)], [sound(0.001)]]
    answers = [answer_of(llm, model, samples) for samples in several]
    assert len({tuple(answer) for answer in answers}) > 1
    ids = llm.generate({"prompt_token_ids": [5, TOKEN, 6], "multi_modal_data": {"audio": sound(0.5)}}, GREEDY)
    assert list(ids[0].prompt_token_ids or ()).count(TOKEN) == 7
    data = base64.b64encode(wav(sound(0.5))).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    (said,) = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], GREEDY)
    spoken = list(said.prompt_token_ids or ())
    assert spoken.count(TOKEN) == 7
    assert is_greedy(model, spoken, [clip_of(heard(wav(sound(0.5))))], list(said.outputs[0].token_ids))
    llm.close()


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def heard(data: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(1 << 20), "<i2").astype(np.float32) / (1 << 15)


def split(folder: Path) -> tuple[Path, Path]:
    """The adapter alone, as released checkpoints are, the language model, and the whole Whisper."""
    adapter, text, audio = (folder / name for name in ("adapter", "text", "audio"))
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for one in (adapter, text, audio):
        one.mkdir()
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith("multi_modal_projector.")},
              adapter / "model.safetensors")  # fmt: skip
    save_file({name.removeprefix("language_model."): tensor for name, tensor in tensors.items()
               if name.startswith("language_model.")}, text / "model.safetensors")  # fmt: skip
    (text / "config.json").write_text(json.dumps(raw.pop("text_config")))
    whisper = tf.WhisperForConditionalGeneration(tf.WhisperConfig(**AUDIO)).float()
    own = {name.removeprefix("audio_tower."): tensor for name, tensor in tensors.items() if "audio_tower." in name}
    whisper.model.encoder.load_state_dict(own)
    whisper.save_pretrained(audio)
    raw.pop("audio_config")
    raw |= {"text_model_id": str(text), "audio_model_id": str(audio)}
    (adapter / "config.json").write_text(json.dumps(raw))
    write_tokenizer(adapter)
    return adapter, text


def test_parts_that_a_checkpoint_names(tmp_path: Path) -> None:
    model = make_model("UltravoxModel", tmp_path)
    adapter, text = split(tmp_path)
    llm = LLM(str(adapter), **OPTIONS)
    first = answer_of(llm, model, [sound(1.7, 1)])
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    assert answer_of(llm, model, [sound(1.7, 1)]) == first
    llm.close()
    with pytest.raises(ModelNotFoundError, match=r"has no text model of its own and names './gone' \(text_model_id\)"):
        LLM(str(adapter), hf_overrides={"text_model_id": "./gone"}, **OPTIONS)
    with pytest.raises(
        CheckpointError, match="has neither audio_config nor the name of a checkpoint in audio_model_id"
    ):
        LLM(str(adapter), hf_overrides={"audio_model_id": None}, **OPTIONS)
    with pytest.raises(CheckpointError, match=r"does not fit the encoder .* tensors are missing"):
        LLM(str(adapter), hf_overrides={"audio_model_id": str(text), "audio_config": AUDIO}, **OPTIONS)


def test_a_checkpoint_that_has_all_needs_nothing_else(tmp_path: Path) -> None:
    """Though it names what it was made of."""
    model = make_model("UltravoxModel mid", tmp_path)
    llm = LLM(str(tmp_path), hf_overrides={"text_model_id": "./gone", "audio_model_id": "./gone"}, **OPTIONS)
    answer_of(llm, model, [sound(0.5)])
    llm.close()


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({"hidden_size": 1 << 40}, CheckpointError, "hidden_size"),
        ({"hidden_size": 1 << 20}, CheckpointError, "a projector of .* numbers; the files of .* have"),
        ({"hidden_size": 39}, CheckpointError, "wants an even number"),
        ({"stack_factor": 0}, CheckpointError, "stack_factor"),
        ({"stack_factor": 1 << 30}, CheckpointError, "stack_factor"),
        ({"stack_factor": 1024}, CheckpointError, "a projector of .* numbers; the files of .* have"),
        ({"audio_config": {"encoder_layers": 10**9}}, CheckpointError, "encoder_layers"),
        ({"audio_config": {"encoder_layers": 4096}}, CheckpointError, "numbers; the files of"),
        ({"audio_config": {"max_source_positions": 10**9}}, CheckpointError, "max_source_positions"),
        ({"audio_config": {"num_mel_bins": 10**9}}, CheckpointError, "num_mel_bins"),
        ({"audio_config": {"d_model": "x"}}, CheckpointError, "d_model"),
        ({"audio_config": {"encoder_attention_heads": 5}}, CheckpointError, "is not a multiple of 5 heads"),
        ({"audio_config": {"model_type": "wav2vec2"}}, NotBuiltError, "'wav2vec2' is not built; whisper is"),
        ({"audio_config": [1]}, CheckpointError, "audio_config must be a mapping"),
        ({"text_config": "x"}, CheckpointError, "text_config must be a mapping"),
        ({"projector_act": "nothing"}, InputError, "projector_act 'nothing' is unknown"),
        ({"num_projector_layers": 2}, NotBuiltError, "num_projector_layers = 2 is not built"),
        ({"audio_latency_block_size": 100}, NotBuiltError, "audio_latency_block_size = 100 is not built"),
        ({"text_model_lora_config": {"r": 8}}, NotBuiltError, "text_model_lora_config has rank 8"),
    ],
)  # fmt: skip
def test_hostile_configurations(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], kind: type[Exception], why: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile_ultravox"
    if not folder.exists():
        make_model("UltravoxModel", folder)
    with pytest.raises(kind, match=why):
        LLM(str(folder), hf_overrides=changes, **OPTIONS)
