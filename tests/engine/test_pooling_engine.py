"""How pooling requests run: alone or together, whole or in chunks, after cached prefixes, in parts, cut and refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, PoolingParams, SamplingParams
from quire.config import EngineArgs
from quire.config.model import PoolerConfig
from quire.quant.shard import ALONE
from quire.schema.errors import CheckpointError, ConfigError, InputError
from quire.worker.pooling_results import Complete, ResultRules, results_of
from tests.pooling_models import VOCAB, make_pooling, write_sentence_files


def texts_of(*lengths: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(20, VOCAB) for _ in range(n)] for n in lengths]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **options)


def vectors(llm: LLM, texts: Any, **more: Any) -> list[list[float]]:
    return [result.outputs.embedding for result in llm.embed(texts, use_tqdm=False, **more)]


def near(one: Any, other: Any, limit: float = 1e-5) -> bool:
    return (torch.as_tensor(one) - torch.as_tensor(other)).abs().max().item() <= limit


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make_pooling("BertModel", folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    make_pooling("Qwen3Model", folder)
    return folder


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_together_is_as_alone(name: str, request: pytest.FixtureRequest) -> None:
    """Prompts of a mixed batch, also where steps hold only some of them, and one of the model's whole length."""
    folder = request.getfixturevalue(name)
    texts = texts_of(5, 64, 1, 17, 64, 30, 2)
    with engine(folder, max_num_batched_tokens=70, max_num_seqs=3) as llm:
        together = vectors(llm, texts)
        alone = [vectors(llm, [text])[0] for text in texts]
    assert all(near(one, other) for one, other in zip(together, alone, strict=True))
    assert not near(together[0], together[1], 1e-2)


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_chunks_change_nothing(kind: str, qwen: Path) -> None:
    texts = texts_of(60, 33, 7)
    pooler = {"pooling_type": kind}
    with engine(qwen, pooler_config=pooler) as llm:
        whole = vectors(llm, texts)
        tokens = [r.outputs.data for r in llm.encode(texts, pooling_task="token_embed", use_tqdm=False)]
    with engine(qwen, pooler_config=pooler, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        cut = vectors(llm, texts)
        cut_tokens = [r.outputs.data for r in llm.encode(texts, pooling_task="token_embed", use_tqdm=False)]
    assert all(near(one, other) for one, other in zip(whole, cut, strict=True))
    assert all(near(one, other) for one, other in zip(tokens, cut_tokens, strict=True))


def test_only_last_reads_cached_prefixes(qwen: Path) -> None:
    """A cached prefix has no hidden states; whatever needs them computes them again, and comes to the same."""
    (text,) = texts_of(48)
    first = PoolingParams(task="embed")
    with engine(qwen, block_size=16) as llm:
        runs = [llm.embed([text], pooling_params=first, use_tqdm=False)[0] for _ in range(2)]
        tokens = llm.encode([text], pooling_task="token_embed", use_tqdm=False)[0]
    assert runs[0].num_cached_tokens == 0 and runs[1].num_cached_tokens == 32
    assert near(runs[0].outputs.embedding, runs[1].outputs.embedding)
    assert tokens.num_cached_tokens == 0 and tokens.outputs.data.shape == (48, 32)
    with engine(qwen, block_size=16, pooler_config={"pooling_type": "MEAN"}) as llm:
        runs = [llm.embed([text], use_tqdm=False)[0] for _ in range(2)]
    assert runs[1].num_cached_tokens == 0 and near(runs[0].outputs.embedding, runs[1].outputs.embedding)


def test_preempted_prompts_start_again(qwen: Path) -> None:
    """A prompt that is preempted between two chunks is computed anew, and none of its vectors counts twice."""
    texts = texts_of(60, 33)
    pooler = {"pooling_type": "MEAN"}
    with engine(qwen, pooler_config=pooler) as llm:
        expected = vectors(llm, texts)
    with engine(qwen, pooler_config=pooler, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        front = llm.llm_engine.front
        llm.llm_engine.add([front.prepare(str(i), text, PoolingParams()) for i, text in enumerate(texts)])
        assert llm.llm_engine.step() == [] and llm.llm_engine.step() == []
        assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        results: dict[str, Any] = {}
        while len(results) < len(texts):
            results |= {result.request_id: result.outputs.data.data for result in llm.llm_engine.step()}
    for index, one in enumerate(expected):
        assert near(struct.unpack("32f", results[str(index)]), one)


def test_matryoshka_is_cutting_and_normalising(bert: Path) -> None:
    texts = texts_of(5, 9)
    with engine(bert, hf_overrides={"is_matryoshka": True}) as llm:
        whole, cut = vectors(llm, texts), vectors(llm, texts, pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(InputError, match="dimensions is 33; for this model it must be from 1 to 32"):
            vectors(llm, texts, pooling_params=PoolingParams(dimensions=33))
    for one, other in zip(whole, cut, strict=True):
        assert near(torch.nn.functional.normalize(torch.tensor(one[:8]), dim=-1), other, 1e-6)
    with engine(bert, hf_overrides={"matryoshka_dimensions": [4, 16]}, pooler_config={"dimensions": 4}) as llm:
        assert len(vectors(llm, texts)[0]) == 4
        with pytest.raises(InputError, match="one of 4, 16"):
            vectors(llm, texts, pooling_params=PoolingParams(dimensions=8))
    with engine(bert) as llm, pytest.raises(InputError, match="not trained for shorter embeddings"):
        vectors(llm, texts, pooling_params=PoolingParams(dimensions=8))


def test_sentence_transformers_files(tmp_path: Path) -> None:
    """They decide pooling, normalisation, length and what follows pooling; options go before them."""
    trunk = make_pooling("BertModel", tmp_path)
    write_sentence_files(tmp_path, normalize=False, max_length=20, dense=8)
    torch.manual_seed(2)
    dense = torch.nn.Linear(32, 8)
    (tmp_path / "2_Dense").mkdir()
    about = {"in_features": 32, "out_features": 8, "bias": True,
             "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(about))
    save_file(
        {f"linear.{k}": v.detach() for k, v in dense.state_dict().items()}, tmp_path / "2_Dense/model.safetensors"
    )
    (text,) = texts_of(9)
    with torch.no_grad():
        states = trunk(input_ids=torch.tensor([text])).last_hidden_state[0]
        means, firsts = (dense(vector).tanh() for vector in (states.mean(0), states[0]))
    with engine(tmp_path) as llm:
        assert llm.model_config.max_model_len == 20
        assert near(vectors(llm, [text])[0], means, 1e-4)
        with pytest.raises(InputError, match="has 21 tokens, and this model takes 20"):
            vectors(llm, texts_of(21))
    with engine(tmp_path, pooler_config={"seq_pooling_type": "cls", "normalize": True}) as llm:
        assert near(vectors(llm, [text])[0], torch.nn.functional.normalize(firsts, dim=-1), 1e-4)


def test_bad_sentence_files_are_refused(tmp_path: Path) -> None:
    make_pooling("BertModel", tmp_path)
    write_sentence_files(tmp_path, "max_tokens")
    with pytest.raises(CheckpointError, match="asks for the pooling pooling_mode_max_tokens"):
        EngineArgs(model=str(tmp_path)).create_engine_config()
    modules = [{"path": "../elsewhere", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="lies outside the model's folder"):
        EngineArgs(model=str(tmp_path)).create_engine_config()
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read as JSON"):
        EngineArgs(model=str(tmp_path)).create_engine_config()


def test_long_inputs_in_parts(qwen: Path) -> None:
    """The parts' means, weighted by their tokens, are the mean over all of them."""
    (text,) = texts_of(150)
    pooler = {"pooling_type": "MEAN", "enable_chunked_processing": True, "max_embed_len": 160}
    with engine(qwen, pooler_config=pooler) as llm:
        (whole,) = llm.embed([text], use_tqdm=False)
        parts = [text[:64], text[64:128], text[128:]]
        raw = vectors(llm, parts, pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(InputError, match=r"max_embed_len \(160\)"):
            llm.embed(texts_of(161), use_tqdm=False)
    total = sum(torch.tensor(one) * len(part) for one, part in zip(raw, parts, strict=True)) / 150
    assert near(whole.outputs.embedding, torch.nn.functional.normalize(total, dim=-1))
    assert whole.prompt_token_ids == text


def test_truncation_keeps_the_special_tokens(bert: Path) -> None:
    with engine(bert) as llm:
        text = "the cat is a dog . the river is the log"
        whole = llm.embed(text, use_tqdm=False)[0].prompt_token_ids
        cut = llm.embed(text, truncate_prompt_tokens=6, use_tqdm=False)[0].prompt_token_ids
        left = llm.embed(text, truncate_prompt_tokens=6, tokenization_kwargs={"truncation_side": "left"},
                         use_tqdm=False)[0].prompt_token_ids  # fmt: skip
        longest = llm.embed(list(range(20, 100)), truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids
    assert cut == [*whole[:5], whole[-1]] and left == [whole[0], *whole[-5:]] and len(longest) == 64


def test_scores_of_embeddings_are_cosines(bert: Path) -> None:
    with engine(bert, pooler_config={"use_activation": False}) as llm:
        texts = ["the cat", "a dog", "river . boat"]
        raw = torch.tensor(vectors(llm, texts))
        scores = [one.outputs.score for one in llm.score(texts[0], texts[1:], use_tqdm=False)]
        with pytest.raises(InputError, match="data_1 has 2 texts and data_2 3"):
            llm.score(texts[:2], texts, use_tqdm=False)
    raw = torch.nn.functional.normalize(raw, dim=-1)
    assert near(scores, raw[1:] @ raw[0])


def test_template_of_a_score(tmp_path: Path) -> None:
    make_pooling("Qwen3ForSequenceClassification", tmp_path, num_labels=1)
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    with engine(tmp_path) as llm:
        (result,) = llm.score("cat", "mat", chat_template=template, use_tqdm=False)
        assert result.prompt_token_ids == llm.get_tokenizer().encode("query cat document mat ")


def test_activation_and_calibration(tmp_path: Path) -> None:
    make_pooling("BertForSequenceClassification", tmp_path, num_labels=3)
    (text,) = texts_of(7)
    with engine(tmp_path) as llm:
        raw = llm.classify([text], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.probs
        softened = llm.classify([text], use_tqdm=False)[0].outputs.probs
    assert near(torch.tensor(raw).softmax(-1), softened)
    with engine(tmp_path, pooler_config={"logit_bias": 0.5, "logit_sigma": 2.0, "softmax": False}) as llm:
        moved = llm.classify([text], use_tqdm=False)[0].outputs.probs
    assert near((torch.tensor(raw) - 0.5) / 2, moved)
    with engine(tmp_path, hf_overrides={"problem_type": "multi_label_classification"}) as llm:
        assert near(torch.tensor(raw).sigmoid(), llm.classify([text], use_tqdm=False)[0].outputs.probs)


def test_results_that_are_not_numbers_fail_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make_pooling("BertModel", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][77] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    with engine(tmp_path) as llm:
        with pytest.raises(Exception, match="not finite"):
            llm.embed([[20, 77]], use_tqdm=False)
        assert len(vectors(llm, [[20, 21]])[0]) == 32


def test_an_error_is_that_of_one_request() -> None:
    """Of requests that go through the head together, one cannot be computed: the others have their results."""

    def embed(vectors: torch.Tensor) -> torch.Tensor:
        if bool((vectors == 13).any()):
            raise IndexError("no such row")
        return vectors * 2

    params = PoolingParams(task="embed", use_activation=False)
    values = torch.tensor([1.0, 13.0, 3.0])[:, None].repeat(1, 2)
    complete = Complete(["a", "b", "c"], [params] * 3, values)
    model, rules = Mock(embed=embed, storage=Mock(group=ALONE)), ResultRules(PoolerConfig(), ("embed",), "")
    coming = results_of(model, rules, complete)
    coming.arrive()
    found = {name: struct.unpack("<2f", one.data) for name, one in coming.pooled.items()}
    assert found == {"a": (2, 2), "c": (6, 6)}
    assert list(coming.failed) == ["b"] and "IndexError" in coming.failed["b"]


def test_what_does_not_fit_is_refused(bert: Path, tmp_path: Path) -> None:
    with engine(bert) as llm:
        for call, words in (
            (lambda: llm.generate("cat", use_tqdm=False), "runner=pooling, and cannot generate"),
            (lambda: llm.classify("cat", use_tqdm=False), "task 'classify' is not one of this model's"),
            (lambda: llm.encode("cat", pooling_task="plugin", use_tqdm=False), "task 'plugin'"),
            (lambda: llm.embed([[]], use_tqdm=False), "cannot be empty"),
            (lambda: llm.embed([[VOCAB]], use_tqdm=False), "out of vocabulary"),
            (lambda: llm.embed([[20], [20], []], use_tqdm=False), r"^prompts\[2\]: .*cannot be empty"),
            (lambda: llm.embed(texts_of(2, 65), use_tqdm=False), r"^prompts\[1\]: the input has 65 tokens"),
            (lambda: llm.score("cat", ["cat", "dog " * 65], use_tqdm=False), "^the input has"),
            (lambda: llm.embed(texts_of(65), use_tqdm=False), "the input has 65 tokens, and this model takes 64"),
            (lambda: llm.embed("cat", pooling_params=PoolingParams(dimensions=0), use_tqdm=False), "dimensions"),
            (lambda: llm.embed("cat", pooling_params=SamplingParams(), use_tqdm=False), "pooling_params"),  # type: ignore[arg-type]
            (lambda: llm.embed("cat", truncate_prompt_tokens=65, use_tqdm=False), "more than max_model_len"),
            (lambda: llm.embed([{"prompt_token_ids": [20, 21], "token_type_ids": [1, 0]}], use_tqdm=False), "zeros"),
        ):
            with pytest.raises(InputError, match=words):
                call()
        assert len(llm.embed("cat", use_tqdm=False)) == 1
    make_pooling("LlamaForCausalLM", tmp_path)
    with engine(tmp_path) as llm, pytest.raises(InputError, match="runner=generate, and cannot be pooled"):
        llm.embed("cat", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "generate"}, "is an encoder, which cannot generate"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooling_type is 'MAX'"),
        ({"pooler_config": {"pooling_type": "CLS", "seq_pooling_type": "CLS"}}, "pooling_type is a shorthand"),
        ({"pooler_config": {"normalize": True, "use_activation": False}}, "say the same thing and differ"),
        ({"pooler_config": {"max_embed_len": 9}}, "needs enable_chunked_processing"),
        ({"pooler_config": {"logit_sigma": 0}}, "logit_sigma is 0"),
        ({"pooler_config": {"task": "classify"}}, "task='classify': this model can"),
        ({"model_impl": "transformers"}, "cannot be pooled"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str, bert: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(bert, **options)


def test_types_of_results(bert: Path) -> None:
    """The documented classes; a raw result is a tensor."""
    with engine(bert) as llm:
        (one,) = llm.encode("the cat", use_tqdm=False)
        (embedded,) = llm.embed("the cat", use_tqdm=False)
    assert isinstance(one.outputs.data, torch.Tensor) and one.outputs.data.dtype is torch.float32
    assert embedded.outputs.hidden_size == 32 and one.outputs.data.tolist() == embedded.outputs.embedding
    assert struct.pack("32f", *embedded.outputs.embedding) == one.outputs.data.numpy().tobytes()


def test_texts_run_while_later_ones_are_read(bert: Path) -> None:
    """More prompts than are prepared at once: results in their order, and those of both kinds of parameters."""
    texts = texts_of(*[1 + index % 13 for index in range(300)])
    raw = PoolingParams(task="embed", use_activation=False)
    with engine(bert, max_num_batched_tokens=128, max_num_seqs=8) as llm:
        given = [llm.embed([text], pooling_params=raw, use_tqdm=False)[0] for text in texts[:14]]
        params = [raw if index < 14 else PoolingParams(task="embed") for index in range(len(texts))]
        results = llm.embed(texts, pooling_params=params, use_tqdm=False)
        assert [one.prompt_token_ids for one in results] == texts
        assert all(near(one.outputs.embedding, other.outputs.embedding)
                   for one, other in zip(given, results, strict=False))  # fmt: skip
        assert abs(sum(x * x for x in results[-1].outputs.embedding) - 1) < 1e-5
        front = llm.llm_engine.front
        with pytest.raises(InputError, match="out of vocabulary"):  # far behind what runs by then
            llm.embed([*texts, [VOCAB]], use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests() and not front.client.loop.live_ids()
        assert near(vectors(llm, texts[:1])[0], vectors(llm, texts)[0])


def test_many_strings_are_tokenized_as_each_alone(bert: Path) -> None:
    words = ["cat", "dog sat", "the cat sat", "a"]
    with engine(bert) as llm:
        texts = [f"{words[index % 4]} {words[index % 3]}" for index in range(150)]
        together = llm.embed(texts, use_tqdm=False)
        alone = {text: llm.embed(text, use_tqdm=False)[0].prompt_token_ids for text in set(texts)}
    assert [one.prompt_token_ids for one in together] == [alone[text] for text in texts]
