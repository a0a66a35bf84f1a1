"""Every form a tokenizer comes in, loaded from files that are written here, against the libraries they come from."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Pipeline

from quire.base import registry
from quire.schema.errors import CheckpointError, InputError, MissingExtraError, ModelNotFoundError, NotBuiltError
from quire.text.tokenizer import MODES, Tokenizer, load_tokenizer

CORPUS = [
    "Hello world, this isn't a test. Do not panic! 12345 67",
    "naïve café résumé Zürich ß ½ “quoted”",
    "你好世界，今天天气很好。こんにちは 안녕하세요",
    "🦙 llamas 👩‍👩‍👧 family",
    "  two  spaces\n\n\ttabs\r\nlines   ",
    "def f(x):\n    return x ** 2  # comment",
    "the quick brown fox jumps over the lazy dog and the other dog",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def random_texts(count: int = 200) -> list[str]:
    rng = random.Random(5)
    alphabet = "abc ABC  \n\t123é ü你好こ안🦙'.,!-" + "the"
    return [*CORPUS, "", " ", *("".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(count))]


def byte_level(size: int = 400) -> Pipeline:
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(CORPUS * 3, trainer)
    return pipeline


def write(folder: Path, **files: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        name = name.replace("__", ".")
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(folder)


def same(ours: Tokenizer, pipeline: Pipeline) -> None:
    for text in random_texts():
        assert ours.encode(text) == pipeline.encode(text).ids
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == pipeline.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == pipeline.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_json_is_taken_at_its_word(tmp_path: Path) -> None:
    pipeline = byte_level()
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    pipeline.enable_truncation(4)  # left on by whoever saved it; an engine must not cut prompts
    pipeline.enable_padding(length=9)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path, tokenizer_config__json={"add_bos_token": False, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    )
    ours = load_tokenizer(str(tmp_path))
    pipeline.no_truncation()
    pipeline.no_padding()
    same(ours, pipeline)
    assert ours.encode("a")[0] == 1 and ours.encode("a")[-1] == 2
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, None)
    assert ours.vocab_size == len(ours) == pipeline.get_vocab_size()
    assert ours.get_vocab() == pipeline.get_vocab()
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).encode("a") == ours.encode("a")
    assert ours.name_or_path == str(tmp_path)


def test_without_a_post_processor_the_config_says_what_to_add(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(str(tmp_path)).encode("Hello")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    write(tmp_path, tokenizer_config__json={**names, "add_bos_token": True, "add_eos_token": True})
    assert load_tokenizer(str(tmp_path)).encode("Hello") == [1, *plain, 2]
    write(tmp_path, tokenizer_config__json={**names, "add_bos_token": True})
    assert load_tokenizer(str(tmp_path)).encode("Hello") == [1, *plain]


def test_added_tokens_of_every_file_arrive(tmp_path: Path) -> None:
    pipeline = byte_level()
    size = pipeline.get_vocab_size()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path,
        added_tokens__json={"<plain>": size},
        tokenizer_config__json={
            "added_tokens_decoder": {
                str(size + 1): {
                    "content": "<tool>",
                    "special": True,
                    "lstrip": False,
                    "rstrip": True,
                    "normalized": False,
                },
                str(size + 2): {"content": "<word>", "special": False},
            },
            "extra_special_tokens": {"image_token": "<img>"},
        },
        special_tokens_map__json={"eos_token": "</s>", "additional_special_tokens": ["<more>"], "pad_token": None},
    )
    ours = load_tokenizer(str(tmp_path))
    assert [ours.token_to_id(t) for t in ("<plain>", "<tool>", "<word>")] == [size, size + 1, size + 2]
    image, more = ours.token_to_id("<img>"), ours.token_to_id("<more>")
    assert {image, more} == {size + 3, size + 4}
    assert ours.vocab_size == size + 5
    assert ours.special_tokens_map == {"eos_token": "</s>", "image_token": "<img>"}
    assert ours.encode("a<tool>  b") == [*ours.encode("a"), size + 1, *ours.encode("b")]  # rstrip
    ids = [size, size + 1, size + 2, more, 2]
    assert ours.decode(ids, skip_special_tokens=True) == "<plain><word>"
    assert set(ours.all_special_ids) == {0, 1, 2, size + 1, image, more}
    assert ours.get_added_vocab()["<word>"] == size + 2
    assert ours.convert_ids_to_tokens([size, 2], skip_special_tokens=True) == ["<plain>"]
    assert ours.convert_tokens_to_ids(["</s>", "<none>"]) == [2, None]


def test_spare_tokens_take_the_name_the_config_gives_them(tmp_path: Path) -> None:
    pipeline = byte_level()
    spare = pipeline.token_to_id("the")
    assert spare is not None
    pipeline.save(str(tmp_path / "tokenizer.json"))
    write(
        tmp_path, tokenizer_config__json={"added_tokens_decoder": {str(spare): {"content": "<new>", "special": True}}}
    )
    ours = load_tokenizer(str(tmp_path))
    assert ours.token_to_id("<new>") == spare and ours.token_to_id("the") is None
    assert ours.encode("<new>") == [spare] and spare not in ours.encode("the other")
    assert ours.decode(ours.encode("the other")) == "the other"
    assert ours.vocab_size == pipeline.get_vocab_size()


def test_an_added_token_at_the_wrong_place_is_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config__json={"added_tokens_decoder": {"9999": {"content": "<far>"}}})
    with pytest.raises(CheckpointError, match=r"'<far>' should have id 9999"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<a>"}}}, {"added_tokens_decoder": {"-1": {"content": "<a>"}}},
        {"added_tokens_decoder": {str(1 << 40): {"content": "<a>"}}}, {"added_tokens_decoder": {"5": 7}},
        {"added_tokens_decoder": {"5": {"content": None}}}, {"added_tokens_decoder": {"5": {}}},
        {"added_tokens_decoder": [1]}, {"chat_template": [{"name": "a"}]}, {"chat_template": [7]},
        {"bos_token": "\ud800"}, {"added_tokens_decoder": {"5": {"content": "a\ud800"}}},
        {"extra_special_tokens": ["\udfff"]},
    ],
)  # fmt: skip
def test_small_files_that_lie_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config__json=config)
    with pytest.raises(CheckpointError):
        load_tokenizer(str(tmp_path))


def test_small_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for raw in ("[" * 200_000, "9" * 10_000, "{", "7"):
        (tmp_path / "tokenizer_config.json").write_text(raw)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            load_tokenizer(str(tmp_path))


def test_templates_come_from_their_own_files_first(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).chat_template is None
    write(tmp_path, tokenizer_config__json={"chat_template": "from config"})
    assert load_tokenizer(str(tmp_path)).chat_template == "from config"
    write(tmp_path, chat_template__json={"chat_template": "from json"})
    assert load_tokenizer(str(tmp_path)).chat_template == "from json"
    write(tmp_path, chat_template__jinja="from jinja")
    assert load_tokenizer(str(tmp_path)).chat_template == "from jinja"
    write(tmp_path / "additional_chat_templates", tool_use__jinja="for tools")
    assert load_tokenizer(str(tmp_path)).chat_template == {"default": "from jinja", "tool_use": "for tools"}
    listed = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    other = tmp_path / "other"
    other.mkdir()
    byte_level().save(str(other / "tokenizer.json"))
    write(other, tokenizer_config__json={"chat_template": listed})
    assert load_tokenizer(str(other)).chat_template == {"default": "a", "rag": "b"}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": False}])
def test_sentencepiece_files_need_no_sentencepiece(kind: str, options: dict[str, bool], tmp_path: Path) -> None:
    oracle_package = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(line.replace("\n", " ") for line in CORPUS * 5), encoding="utf-8")
    oracle_package.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=420, model_type=kind,
        byte_fallback=True, normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        user_defined_symbols=["<tool>"], hard_vocab_limit=False, minloglevel=9, **options,
    )  # fmt: skip
    oracle = oracle_package.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert ours.vocab_size == oracle.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    different = 0
    texts = [text for text in random_texts() if "\r\n" not in text]  # the library takes it for one character
    for text in texts:
        expected = oracle.encode(text)
        assert ours.encode(text) == [1, *ours.encode(text, add_special_tokens=False)]
        mine = ours.encode(text, add_special_tokens=False)
        assert ours.decode(mine) == oracle.decode(mine)
        different += mine != expected
    assert different == 0


def test_ranked_bytes_need_no_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    educational = pytest.importorskip("tiktoken._educational")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = educational.bpe_train("\n".join(CORPUS * 2), 400, pattern, visualise=None)
    lines = "".join(
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda r: r[1])
    )
    (tmp_path / "cl100k_base.tiktoken").write_text(lines)
    oracle = tiktoken.Encoding("here", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = load_tokenizer(str(tmp_path / "cl100k_base.tiktoken"))
    for text in [*random_texts(), *(char * n for char in " a=\n" for n in range(1, 40))]:
        assert ours.encode(text) == oracle.encode(text), text
        assert ours.decode(ours.encode(text)) == text


def test_a_rank_file_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    lines = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "tokenizer.model").write_text(lines)
    with pytest.raises(InputError, match=r"does not say how text is cut.*trust_remote_code"):
        load_tokenizer(str(tmp_path))
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "ChatGLM4Tokenizer"})
    assert load_tokenizer(str(tmp_path)).encode("ab") == [97, 98]
    (tmp_path / "tokenizer.model").write_text(lines.replace("AA== 0", "AA== 7"))
    with pytest.raises(CheckpointError, match="line 1 is not `base64 0`"):
        load_tokenizer(str(tmp_path))


def test_qwen_ranks_bring_their_special_tokens(tmp_path: Path) -> None:
    lines = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "qwen.tiktoken").write_text(lines)
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("<|im_start|>a<|extra_204|>") == [257, 97, 256 + 3 + 204]
    assert ours.eos_token_id == 256


def vocab_and_merges(folder: Path, config: dict[str, Any]) -> Pipeline:
    pipeline = byte_level()
    data = json.loads(pipeline.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in data["merges"])
    write(folder, vocab__json=data["vocab"], merges__txt=merges, tokenizer_config__json=config)
    return pipeline


def test_vocab_and_merges_as_old_checkpoints_have_them(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
    pipeline = vocab_and_merges(tmp_path, config)
    same(load_tokenizer(str(tmp_path)), pipeline)
    write(tmp_path, tokenizer_config__json={**config, "add_bos_token": True})  # OPT
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("Hello") == [2, *pipeline.encode("Hello").ids]
    write(tmp_path, tokenizer_config__json={**config, "tokenizer_class": "RobertaTokenizer"})
    assert load_tokenizer(str(tmp_path)).encode("Hello") == [1, *pipeline.encode("Hello").ids, 2]
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(InputError, match=r"'CLIPTokenizer' with vocab.json and merges.txt is not known"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").write_text("a b c\n")
    write(tmp_path, tokenizer_config__json=config)
    with pytest.raises(CheckpointError, match=r"merges.txt line 1"):
        load_tokenizer(str(tmp_path))


def test_word_pieces_from_a_vocab_txt(tmp_path: Path) -> None:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", ",", "zurich", "Hello"]
    write(tmp_path, vocab__txt="\n".join(vocab) + "\n", tokenizer_config__json={"tokenizer_class": "BertTokenizer"})
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("Hello, worlds Zürich!") == [2, 5, 8, 6, 7, 9, 1, 3]
    assert ours.decode([2, 5, 8, 6, 7, 3], skip_special_tokens=True) == "hello, worlds"
    write(tmp_path, tokenizer_config__json={"do_lower_case": False})
    assert load_tokenizer(str(tmp_path)).encode("Hello", add_special_tokens=False) == [10]


def test_transformers_agrees_on_a_saved_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pipeline = byte_level()
    pipeline.add_special_tokens([AddedToken("<tool>", rstrip=True)])
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ messages }}"
    )
    inner.save_pretrained(str(tmp_path))
    ours = load_tokenizer(str(tmp_path))
    assert set(ours.all_special_ids) >= set(inner.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (inner.bos_token_id, inner.eos_token_id)
    assert ours.chat_template == inner.chat_template and len(ours) == len(inner)
    for text in [*random_texts(), "a<tool>  b</s>"]:
        ids = inner.encode(text)
        assert ours.encode(text) == ids
        assert ours.convert_ids_to_tokens(ids) == inner.convert_ids_to_tokens(ids)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == inner.decode(ids, skip_special_tokens=skip)


def test_the_slow_mode_is_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    write(tmp_path, vocab__txt="\n".join(vocab) + "\n", tokenizer_config__json={"tokenizer_class": "BertTokenizer"},
          config__json={"model_type": "bert"})  # fmt: skip
    slow = load_tokenizer(str(tmp_path), mode="slow")
    assert slow.encode("hello worlds") == [2, 5, 6, 7, 3]
    assert slow.decode([5, 6, 7]) == "hello worlds"
    assert (slow.unk_token_id, slow.vocab_size, slow.id_to_token(5)) == (1, 8, "hello")
    assert slow.pieces is None and slow.token_text(5) == "hello"


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> Any:
        if path.startswith(("transformers", "mistral_common")):
            raise ModuleNotFoundError("no such package", name=path.split(":")[0].split(".")[0])
        return load(path)

    load = registry.load
    for module in ("foreign", "mistral"):
        registry.load(f"quire.text.forms.{module}:load")
        monkeypatch.setattr(f"quire.text.forms.{module}.load", absent)
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[transformers\]"'):
        load_tokenizer(str(tmp_path), mode="slow")
    write(tmp_path, tekken__json=tekken())
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[mistral\]"'):
        load_tokenizer(str(tmp_path)).apply_chat_template([{"role": "user", "content": "hi"}])


def tekken() -> dict[str, Any]:
    words = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None} for i, w in enumerate(words)]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"
    config = {"pattern": pattern, "num_vocab_tokens": 261, "default_vocab_size": 20 + 260, "version": "v3",
              "default_num_special_tokens": 20}  # fmt: skip
    return {"config": config, "vocab": vocab}


def test_tekken_files(tmp_path: Path) -> None:
    write(tmp_path, tekken__json=tekken())
    ours = load_tokenizer(str(tmp_path))
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (280, 1, 2, 11)
    assert ours.encode("hello w") == [1, 20 + 259, 20 + 32, 20 + ord("w")]  # " w" lies past the vocabulary's end
    assert ours.convert_tokens_to_ids("[INST]") == 3
    assert 3 not in ours.encode("[INST] hello") and 2 not in ours.encode("</s>")  # text stays text
    assert ours.decode(ours.encode("[INST] hello é🦙"), skip_special_tokens=True) == "[INST] hello é🦙"
    assert load_tokenizer(str(tmp_path), mode="mistral").encode("hello") == ours.encode("hello")
    write(tmp_path, tekken__json={"config": {}})
    with pytest.raises(CheckpointError, match="not a tekken file"):
        load_tokenizer(str(tmp_path))


def test_a_mistral_chat_is_rendered_by_mistral(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    write(tmp_path, tekken__json=tekken())
    ours = load_tokenizer(str(tmp_path))
    messages = [{"role": "user", "content": "hello [INST]"}, {"role": "assistant", "content": "w"}]
    ids = ours.apply_chat_template([*messages, {"role": "user", "content": "he"}])
    assert isinstance(ids, list) and ids[:2] == [1, 3] and ids.count(3) == 2 and ids.count(4) == 2 and ids.count(2) == 1
    text = ours.apply_chat_template([*messages, {"role": "user", "content": "he"}], tokenize=False)
    assert isinstance(text, str) and ours.encode(text, add_special_tokens=False) == ids
    with pytest.raises(InputError, match="cannot be a Mistral chat"):
        ours.apply_chat_template([{"role": "nobody", "content": "x"}])


def test_what_is_not_there_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*looked for tokenizer.json.*holds nothing"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "absent"))
    write(tmp_path, tokenizer_config__json={"auto_map": {"AutoTokenizer": ["code.Tok", None]}})
    with pytest.raises(InputError, match="trust_remote_code=True runs it"):
        load_tokenizer(str(tmp_path))
    write(tmp_path, tokenizer__json="{")
    with pytest.raises(CheckpointError, match=r"not a readable tokenizer.json"):
        load_tokenizer(str(tmp_path))
    write(tmp_path, tokenizer_config__json="{")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: not valid JSON"):
        load_tokenizer(str(tmp_path))
    write(tmp_path, tokenizer_config__json={})
    (tmp_path / "x.model").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        load_tokenizer(str(tmp_path / "x.model"))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(InputError, match="is not a tokenizer file"):
        load_tokenizer(str(tmp_path / "x.bin"))


def test_modes() -> None:
    with pytest.raises(NotBuiltError, match="'deepseek_v32' is not built"):
        load_tokenizer(".", mode="deepseek_v32")
    with pytest.raises(InputError, match="unknown tokenizer mode 'mistrl'; did you mean 'mistral'"):
        load_tokenizer(".", mode="mistrl")
    assert set(MODES) >= {"auto", "hf", "slow", "mistral"}


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="only a string can be encoded, got int"):
        ours.encode(5)
    with pytest.raises(InputError, match="only strings can be encoded, got NoneType"):
        ours.encode_batch(["a", None])
    with pytest.raises(InputError, match="lone surrogate"):
        ours.encode("a\ud800b")
    with pytest.raises(InputError, match="token ids are numbers"):
        ours.decode([1, -5])
    assert ours.decode([10**6]) == "" and ours.id_to_token(-1) is None
    assert ours.decode(ours.encode("a")[0]) == "a"


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from quire.text.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]); t.encode('a');"
        "bad = {'torch', 'transformers', 'jinja2', 'sentencepiece', 'tiktoken', 'mistral_common', 'numpy'};"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"


def test_normalizers_are_kept(tmp_path: Path) -> None:
    pipeline = byte_level()
    pipeline.normalizer = normalizers.Lowercase()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    same(load_tokenizer(str(tmp_path)), pipeline)


def test_long_decoding_lets_other_threads_run(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path))
    ids = ours.encode(" ".join(CORPUS), add_special_tokens=False)
    assert ours.decode(ids * 200) == ours.decode(ids) * 200  # as much of it as is longer than what is done at once
    many = ids * (1_500_000 // len(ids))

    def turns_of_others() -> int:
        """How often another thread runs while all are decoded: between two calls at most, or all the time."""
        turns, ended = 0, threading.Event()

        def take_turns() -> None:
            nonlocal turns
            while not ended.wait(0.001):
                turns += 1

        thread = threading.Thread(target=take_turns)
        thread.start()
        ours.decode(many)
        ended.set()
        thread.join()
        return turns

    assert any(turns_of_others() > 20 for _ in range(5))
