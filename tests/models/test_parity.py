"""Every declared architecture gives the logits of transformers, through paged attention, however the work is cut.

A tiny random checkpoint of each is written by transformers and loaded from its files. Then: all prompts in one step,
and random chunks of several rows at once over scrambled blocks of 1, 4 or 16 tokens, in turn. Unwritten memory is NaN,
so a read of a wrong place cannot go unnoticed. Controls: what should move the logits must move them.
"""

import dataclasses
import json
import random
import warnings

import pytest
import torch
from safetensors.torch import load_file

from quire.base import env
from quire.checkpoint.media import MODALITIES
from quire.layers.attention import KVLayer
from quire.layers.moe import Moe
from quire.models.build import build_model
from quire.models.decoder import Decoder
from quire.models.zoo import ALIASES, ZOO
from tests.paged import Paged
from tests.tiny_models import ARCHS, VOCAB, make_tiny, tiny_model

LENGTHS = (24, 7, 1, 40)
TOLERANCE = 1e-4


class Case:
    """One architecture: its checkpoint folder, prompts, transformers' logits, and our model loaded from the files."""

    def __init__(self, name, folder):
        self.name = name
        self.hf = make_tiny(name, folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        self.model = build_model(self.config, dtype=torch.float32)
        self.model.load_weights(self.tensors.items())
        rng = random.Random(7)
        self.prompts = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in LENGTHS]
        with torch.no_grad():
            self.want = [self.hf(torch.tensor([p])).logits[0] for p in self.prompts]

    def error(self, logits):
        return max(((w - g).abs().max() / w.abs().max()).item() for w, g in zip(self.want, logits, strict=True))

    def model_with(self, **over):
        model = Decoder(dataclasses.replace(self.model.arch, **over), self.model.storage, max_model_len=512)
        model.load_weights(self.tensors.items())
        return model


@pytest.fixture(scope="module", autouse=True)
def _torch_only():
    """Declarations are compared here. The compiled CPU forms, which another test of this process may have attached,
    round otherwise (some of these tiny models enlarge that a thousandfold) and have tests of their own; a worker in
    batch-invariant mode switches oneDNN off for its process, which rounds otherwise too."""
    with pytest.MonkeyPatch.context() as patch, torch.backends.mkldnn.flags(enabled=True):
        patch.setenv("QUIRE_CPU_KERNELS", "off")
        env.forget_all()
        yield
    env.forget_all()


@pytest.fixture(scope="module", params=ARCHS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_every_declaration_is_tested():
    aliases = {alias for names in ALIASES.values() for alias in names}
    assert set(ZOO.names()) - aliases - set(MODALITIES) == set(ARCHS)  # those: tests/engine/test_media_models.py


def test_nothing_missing(case):
    table = case.model.table()
    assert all(table.load(name, tensor) for name, tensor in case.tensors.items())
    assert table.missing() == []


def test_prompts_in_one_step(case):
    assert case.error(Paged(case.model, case.prompts, block_size=4).whole()) <= TOLERANCE


BLOCK_SIZES = (1, 4, 16)


def test_random_chunks(case):
    check_random_chunks(case, BLOCK_SIZES[list(ARCHS).index(case.name) % len(BLOCK_SIZES)])


@pytest.mark.long
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_random_chunks_of_every_size(case, block_size):
    check_random_chunks(case, block_size)


def check_random_chunks(case, block_size):
    logits = Paged(case.model, case.prompts, block_size=block_size, seed=block_size).in_chunks(seed=block_size)
    assert case.error(logits) <= TOLERANCE


def test_shifted_positions_move_logits(case):
    """Doubled, not offset: rotary positions are relative. Alibi takes its distances from the cache's order, and states
    know no positions."""
    if case.model.arch.alibi or not (case.model.ropes or case.model.positions):
        pytest.skip("positions enter through the order of tokens only")
    paged = Paged(case.model, case.prompts, block_size=4)
    assert case.error(paged.step([(row, n) for row, n in enumerate(LENGTHS)], shift=1)) > 1e-2


def test_windows_matter(case):
    if not any(layer.window for layer in case.model.arch.layers):
        assert all(not m.window for m in case.model.modules() if isinstance(m, KVLayer))
        return
    layers = tuple(dataclasses.replace(layer, window=0) for layer in case.model.arch.layers)
    assert case.error(Paged(case.model_with(layers=layers), case.prompts, block_size=4).whole()) > 1e-2


def test_selection_bias_matters(case):
    mixtures = [m for m in case.model.modules() if isinstance(m, Moe) and m.select_bias is not None]
    if not mixtures:
        return
    kept = [m.select_bias.clone() for m in mixtures]
    for mixture in mixtures:
        mixture.select_bias.zero_()
    error = case.error(Paged(case.model, case.prompts, block_size=4).whole())
    for mixture, bias in zip(mixtures, kept, strict=True):
        mixture.select_bias.copy_(bias)
    assert error > 1e-2


def test_names_of_a_living_model(case):
    """Trainers send named parameters of a transformers model, which spells some tensors differently from its files."""
    other = build_model(case.config, dtype=torch.float32)
    other.load_weights(case.hf.state_dict().items())
    for (name, a), (_, b) in zip(case.model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM", "GPT2LMHeadModel",
                                  "Olmo2ForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM"])  # fmt: skip
def test_bfloat16_is_as_close_as_transformers(name):
    """Both round; ours may not be further from the float32 truth than theirs by more than rounding luck."""
    exact, hf = tiny_model(name), tiny_model(name).bfloat16()
    for (_, wide), (_, narrow) in zip(exact.named_buffers(), hf.named_buffers(), strict=True):
        narrow.data = wide.data.clone()  # .bfloat16() rounds frequencies too; loading a checkpoint does not
    config = hf.config.to_dict() | {"architectures": [name]}
    model = build_model(config, dtype=torch.bfloat16)
    model.load_weights(hf.state_dict().items())
    rng = random.Random(3)
    prompt = [rng.randrange(4, VOCAB) for _ in range(32)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = exact(torch.tensor([prompt])).logits[0]
        theirs = hf(torch.tensor([prompt])).logits[0].float()
    (ours,) = Paged(model, [prompt], block_size=4).in_chunks(seed=1)
    assert ours.dtype is torch.float32
    assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm()
    assert (ours - theirs).norm() <= 2 * (theirs - truth).norm()
