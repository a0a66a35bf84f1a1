"""Embeddings in place of a prompt: equal to transformers' inputs_embeds, however the work is cut up, beside text.

Oracle: transformers scores the embeddings with our answer's behind them in one pass; greedy means that every token is
the argmax of the position before it.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.engine.embeds import decode_embeds, media_of
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.params import BeamSearchParams
from tests.tiny_models import make_tiny

WIDTH, NUM_NEW = 64, 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return str(folder), make_tiny("LlamaForCausalLM", folder)


def vectors(seed: int, count: int) -> torch.Tensor:
    return torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(seed)) * 0.25


def is_greedy(model: transformers.PreTrainedModel, prompt: torch.Tensor, answer: list[int]) -> bool:
    with torch.inference_mode():
        given = torch.cat((prompt, model.get_input_embeddings()(torch.tensor(answer))))
        logits = model(inputs_embeds=given[None].float()).logits[0]
    return bool((logits[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(answer)).all())


@pytest.mark.parametrize("chunk", [2048, 64, 7])
def test_answers_equal_transformers(tiny: tuple[str, transformers.PreTrainedModel], chunk: int) -> None:
    folder, model = tiny
    llm = LLM(folder, dtype="float32", enable_prompt_embeds=True, max_num_batched_tokens=chunk, max_model_len=400)
    stem = vectors(0, 200)
    embeds = [vectors(1, 5), torch.cat((stem, vectors(2, 40))), vectors(3, 300), torch.cat((stem, vectors(4, 9)))]
    texts = ["the river ran under an old stone bridge", "seven children"]
    rng = random.Random(0)
    prompts = [{"prompt_embeds": one} for one in embeds] + texts
    order = list(range(len(prompts)))
    rng.shuffle(order)
    first = dict(zip(order, llm.generate([prompts[i] for i in order], GREEDY), strict=True))
    for i, one in enumerate(embeds):
        assert is_greedy(model, one, list(first[i].outputs[0].token_ids)), i
    for i, text in enumerate(texts, len(embeds)):
        alone = llm.generate(text, GREEDY)[0].outputs[0].token_ids
        assert first[i].outputs[0].token_ids == alone
        ids = torch.tensor(first[i].prompt_token_ids)
        assert is_greedy(model, model.get_input_embeddings()(ids), list(alone))
    again = llm.generate([{"prompt_embeds": embeds[2]}, {"prompt_embeds": torch.cat((stem, vectors(5, 3)))}], GREEDY)
    assert again[0].outputs[0].token_ids == first[2].outputs[0].token_ids
    assert again[0].num_cached_tokens and again[0].num_cached_tokens >= 256, "the same vectors"
    assert again[1].num_cached_tokens and again[1].num_cached_tokens >= 128, "an equal beginning"
    other = embeds[2].clone()
    other[0, 0] += 1
    assert llm.generate({"prompt_embeds": other}, GREEDY)[0].num_cached_tokens == 0, "keyed by content"


def test_other_forms_of_the_same_numbers(tiny: tuple[str, transformers.PreTrainedModel]) -> None:
    folder, model = tiny
    llm = LLM(folder, dtype="float32", enable_prompt_embeds=True, max_model_len=128)
    one = vectors(7, 20).bfloat16().float()
    expected = llm.generate({"prompt_embeds": one}, GREEDY)[0].outputs[0].token_ids
    assert is_greedy(model, one, list(expected))
    forms = [one.bfloat16(), one[None], one.numpy(), one.numpy()[None].astype(np.float64), one.T.contiguous().T]
    for form in forms:
        assert llm.generate({"prompt_embeds": form}, GREEDY)[0].outputs[0].token_ids == expected
    both = llm.generate({"prompt_embeds": one}, SamplingParams(temperature=0, max_tokens=4, n=2))[0]
    assert [list(output.token_ids) for output in both.outputs] == [list(expected)[:4]] * 2
    cut = llm.generate({"prompt_embeds": one}, SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5))[0]
    assert is_greedy(model, one[-5:], list(cut.outputs[0].token_ids))
    wrong = {
        "shape": [vectors(0, 3)[:, :8], vectors(0, 3)[0], torch.zeros(2, 3, WIDTH), torch.zeros(0, WIDTH)],
        "dtype": [torch.zeros(3, WIDTH, dtype=torch.long), np.zeros((3, WIDTH), np.int8)],
        "expected one vector": [object(), 3],
        "sparse": [torch.eye(WIDTH).to_sparse(), torch.eye(WIDTH).to_sparse_csr()],
        "torch.qint8": [torch.quantize_per_tensor(vectors(0, 3), 0.1, 0, torch.qint8)],
        "not a plain array of numbers": [torch.nested.nested_tensor([vectors(0, 3), vectors(0, 2)])],
        "cannot be read": [torch.empty(3, WIDTH, device="meta")],
        "finite numbers": [torch.full((3, WIDTH), torch.nan), np.full((3, WIDTH), np.inf), np.full((3, WIDTH), 1e300)],
        "max_model_len": [vectors(0, 200)],
    }
    for message, forms in wrong.items():
        for form in forms:
            with pytest.raises(InputError, match=message):
                llm.generate({"prompt_embeds": form}, GREEDY)
    for more in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.5}):
        with pytest.raises(InputError, match=next(iter(more))):
            llm.generate({"prompt_embeds": one}, SamplingParams(**more))
    with pytest.raises(InputError, match="it has both"):
        llm.generate({"prompt_embeds": one, "prompt": "x"}, GREEDY)
    with pytest.raises(NotBuiltError, match="beam search"):
        llm.beam_search([{"prompt_embeds": one}], BeamSearchParams(beam_width=2, max_tokens=3))
    assert llm.generate({"prompt_embeds": one}, GREEDY)[0].outputs[0].token_ids == expected, "the engine goes on"


def test_models_with_vectors_per_layer_refuse_them(tmp_path: Path) -> None:
    """Their layers look vectors up by token, and embeddings have none."""
    make_tiny("Gemma3nForCausalLM", tmp_path)
    with pytest.raises(NotBuiltError, match="enable_prompt_embeds is not built for models whose layers have vectors"):
        LLM(str(tmp_path), enable_prompt_embeds=True, max_model_len=64)


def test_not_enabled(tiny: tuple[str, transformers.PreTrainedModel]) -> None:
    llm = LLM(tiny[0], dtype="float32", max_model_len=64)
    with pytest.raises(InputError, match="enable_prompt_embeds=True"):
        llm.generate({"prompt_embeds": vectors(0, 3)}, GREEDY)


# --- the wire form


def saved(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def text_of(value: object, **options: object) -> str:
    return base64.b64encode(saved(value, **options)).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("protocol", [2, 4])
def test_saved_tensors_are_read(dtype: torch.dtype, protocol: int) -> None:
    whole = vectors(1, 30).to(dtype)
    for one in (whole, whole[None], whole[3:9], whole[::2], torch.cat((whole, whole), 1)[:, WIDTH // 2 : -WIDTH // 2]):
        read = decode_embeds(text_of(one, pickle_protocol=protocol), width=WIDTH, most=30)
        assert read.shape == tuple(one.shape) and read.dtype == str(dtype).removeprefix("torch.")
        assert torch.equal(torch.frombuffer(bytearray(read.data), dtype=dtype).view(one.shape), one)
        assert sum(item.length for item in media_of(read, width=WIDTH, most=30)) == one.shape[-2]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.mkdir, (Path("evil"),)  # type: ignore[return-value]


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = vectors(1, 3)
    hostile = [
        saved(Evil()), saved({"a": good}), saved([good]), saved("text"), saved(good.to_sparse()),
        saved(torch.nn.Parameter(good)), saved(good.long()), saved(good, _use_new_zipfile_serialization=False),
        saved(good)[:-40], b"PK\x03\x04", b"", b"\x80\x02.", saved(torch.zeros(5, WIDTH)),
        saved(torch.zeros(1, 1, 1, 3)), saved(torch.empty((1 << 40, WIDTH), device="meta")),
        saved(torch.quantize_per_tensor(good, 0.1, 0, torch.qint8)), saved(good.to_sparse_csr()),
        saved(torch.nested.nested_tensor([good, good[:2]])), saved(good.to(torch.float8_e4m3fn)), saved(good.double()),
    ]  # fmt: skip
    for content in hostile:
        with pytest.raises(InputError, match="prompt_embeds"):
            decode_embeds(base64.b64encode(content).decode(), width=WIDTH, most=4)
    for text in ("not base64!", "é", "A" * 10_000_000):
        with pytest.raises(InputError, match="prompt_embeds"):
            decode_embeds(text, width=WIDTH, most=4)
    assert not list(tmp_path.iterdir()), "nothing ran"


def lying(content: bytes) -> bytes:
    """The same archive with 16 bytes of numbers, and a directory that says there are as many as before."""
    out = io.BytesIO()
    sizes: dict[bytes, int] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            stored = source.read(entry)
            if "/data/" in entry.filename:
                sizes[entry.filename.encode()] = len(stored)
            target.writestr(entry.filename, stored[:16] if "/data/" in entry.filename else stored)
    raw, at = bytearray(out.getvalue()), -1
    while (at := raw.find(b"PK\x01\x02", at + 1)) >= 0:
        name = bytes(raw[at + 46 : at + 46 + struct.unpack_from("<H", raw, at + 28)[0]])
        if name in sizes:
            struct.pack_into("<I", raw, at + 24, sizes[name])
    return bytes(raw)


def test_numbers_are_there_and_each_is_used_once() -> None:
    """What is not there would be read from behind the archive; what is used often would take any memory."""
    for content, why in (
        (lying(saved(vectors(1, 3))), "16 bytes of numbers instead of"),
        (saved(torch.zeros(1).expand(3, WIDTH)), "more than once"),
    ):
        with pytest.raises(InputError, match=why):
            decode_embeds(base64.b64encode(content).decode(), width=WIDTH, most=4)


def test_damaged_files_are_refused_or_read() -> None:
    """Any byte changed: an InputError, or a tensor of the right size; never anything else."""
    content, rng = bytearray(saved(vectors(1, 3))), random.Random(0)
    refused = 0
    for _ in range(1500):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            read = decode_embeds(base64.b64encode(broken).decode(), width=WIDTH, most=4)
            media_of(read, width=WIDTH, most=4)
        except InputError:
            refused += 1
        else:
            assert len(read.data) <= 4 * 4 * WIDTH
    assert refused > 500
