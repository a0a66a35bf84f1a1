"""Other projects' programs that are written for vLLM, on Quire under its name: they import, run, and count the same.

Those that are not installed are skipped (pip install lm-eval trl langchain-community ray). Each runs in a process of
its own, beside the metadata of compat/ as pip would install it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server.live import live

COMPAT = Path(__file__).parents[2] / "compat"
QUESTIONS = Path(__file__).parent / "lm_eval_task" / "questions.jsonl"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: " "
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "([A-Za-z0-9]+)"}, {function: take_first}]}
metric_list: [{metric: exact_match}]
"""


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the metadata that an installed compat/ has."""
    copy = tmp_path_factory.mktemp("compat")
    shutil.copytree(COMPAT, copy / "compat", ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as made; made('made')"
    (copy / "compat" / "made").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=copy / "compat", check=True, capture_output=True, timeout=300)
    return str(copy / "compat" / "made")


def run(metadata: str, *command: str) -> str:
    path = os.pathsep.join([metadata, str(COMPAT), *sys.path])
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=900, env=os.environ | variables
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_metadata_answer_and_say_whose_they_are(metadata: str) -> None:
    code = "from importlib import metadata as m; print(m.version('vllm'), m.metadata('vllm')['Summary'], sep='\\n')"
    version, summary = run(metadata, "-c", code).splitlines()
    assert re.fullmatch(r"\d+\.\d+\.\d+\+quire", version) and summary.startswith("Not vLLM: Quire")
    assert run(metadata, "-c", "import vllm; print(vllm.__version__)").strip() == version


def test_trl_imports(metadata: str) -> None:
    needs("trl")
    code = "import trl.generation.vllm_client as c, trl.generation.vllm_generation as g; print(c.VLLMClient.__name__)"
    assert run(metadata, "-c", code).endswith("VLLMClient\n")


def test_rays_stage_imports(metadata: str) -> None:
    needs("ray")
    needs("pandas")
    code = "import ray.llm._internal.batch.stages.vllm_engine_stage as s; print(s.vLLMEngineStage.__name__)"
    assert run(metadata, "-c", code).endswith("vLLMEngineStage\n")


def test_langchain_generates(metadata: str) -> None:
    needs("langchain_community")
    code = (
        "from quire.config import EngineArgs; from langchain_community.llms import VLLM\n"
        "path = EngineArgs().create_engine_config().model_config.path\n"
        "llm = VLLM(model=path, max_new_tokens=8, temperature=0, vllm_kwargs={'max_model_len': 256})\n"
        "print(llm.invoke('The capital of France is'))"
    )
    assert "Paris" in run(metadata, "-c", code)


# ---- lm-eval, both ways


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model in Hugging Face's form: lm-eval asks transformers for its configuration and tokenizer."""
    needs("lm_eval")
    needs("gguf")
    from transformers import AutoTokenizer

    from quire.config import EngineArgs
    from tests.models.test_real_weights import oracle_of

    place = tmp_path_factory.mktemp("embedded")
    file = Path(EngineArgs().create_engine_config().model_config.path)
    oracle_of(str(file)).save_pretrained(place)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(place)
    return str(place)


def evaluate(metadata: str, work: Path, *flags: str) -> dict[str, dict[str, float]]:
    for name, rest in (("quire_choices", CHOICES), ("quire_answers", ANSWERS)):
        (work / f"{name}.yaml").write_text(TASK.format(name=name, file=QUESTIONS) + rest)
    tasks = ["--tasks", "quire_choices,quire_answers", "--include_path", str(work), "--output_path", str(work / "out")]
    run(metadata, "-m", "lm_eval", *flags, *tasks)
    (file,) = (work / "out").rglob("results_*.json")
    results: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
    return {task: {k: v for k, v in found.items() if "," in k} for task, found in results.items()}


def test_lm_eval_counts_the_same_both_ways(metadata: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    options = f"pretrained={folder},dtype=float32,max_model_len=512,max_num_seqs=16"
    here = evaluate(metadata, tmp_path / "here", "--model", "vllm", "--model_args", options, "--batch_size", "auto")
    with live(folder, engine={"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}) as server:
        options = (
            f"model={folder},base_url={server.url}/v1/completions,num_concurrent=8,tokenized_requests=True,"
            f"tokenizer={folder},max_length=512"
        )
        there = evaluate(metadata, tmp_path / "there", "--model", "local-completions", "--model_args", options)
    assert here == there
    assert here["quire_choices"]["acc,none"] > 0.4  # a quarter is chance
