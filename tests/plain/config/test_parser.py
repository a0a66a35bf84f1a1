"""FlexibleArgumentParser: every spelling an engine option may be given in, and what it says when one is wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from yaml import SafeLoader

from quire.config import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from quire.config.flags import human_readable_int, human_readable_int_or_auto


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="quire")
    EngineArgs.add_cli_args(made)
    return made


def changed(parser: argparse.ArgumentParser, line: str | list[str]) -> dict[str, Any]:
    """What a command line sets."""
    space = parser.parse_args(line.split() if isinstance(line, str) else line)
    return {key: value for key, value in vars(space).items() if value != parser.get_default(key)}


def complaint(parser: argparse.ArgumentParser, line: str | list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split() if isinstance(line, str) else line)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--max-num-seqs 4", {"max_num_seqs": 4}),
        ("--max_num_seqs 4", {"max_num_seqs": 4}),
        ("--max_num_seqs=4", {"max_num_seqs": 4}),
        ("--max-num_seqs=4", {"max_num_seqs": 4}),
        ("-tp 2", {"tensor_parallel_size": 2}),
        ("-tp=2", {"tensor_parallel_size": 2}),
        ("-dp 2 -pp 3 -dcp 4 -pcp 5", {
            "data_parallel_size": 2, "pipeline_parallel_size": 3, "decode_context_parallel_size": 4,
            "prefill_context_parallel_size": 5,
        }),
        ("-q awq", {"quantization": "awq"}),
        ("-O3", {"optimization_level": 3}),
        ("-O 1", {"optimization_level": 1}),
        ("-O=0", {"optimization_level": 0}),
        ("--optimization-level 3", {"optimization_level": 3}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--enforce-eager --no-enforce-eager", {}),
        ("-ep", {"enable_expert_parallel": True}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--max-model-len 32k", {"max_model_len": 32000}),
        ("--max-model-len 32K", {"max_model_len": 32768}),
        ("--max-model-len=25.6k", {"max_model_len": 25600}),
        ("--kv-cache-memory-bytes 2G", {"kv_cache_memory_bytes": 2 << 30}),
        ("--max-num-batched-tokens 8K", {"max_num_batched_tokens": 8192}),
        ("--max-model-len None", {}),
        ("--revision None", {}),
        ("--safetensors-load-strategy None", {}),
        ("--safetensors-load-strategy lazy", {"safetensors_load_strategy": "lazy"}),
        ("--device-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--gpu_memory_utilization .5", {"gpu_memory_utilization": 0.5}),
        ("--scheduling-policy priority", {"scheduling_policy": "priority"}),
        ("--dtype half", {"dtype": "half"}),
        ("--max-lora-rank 64", {"max_lora_rank": 64}),
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("--ignore-patterns *.bin", {"ignore_patterns": ["*.bin"]}),
        ("--hf-token", {"hf_token": True}),
        ("--hf-token abc", {"hf_token": "abc"}),
        ("--load-format plugin_name", {"load_format": "plugin_name"}),
        ("--pt-load-map-location cuda:0", {"pt_load_map_location": "cuda:0"}),
        (["--pt-load-map-location", '{"cuda": "cpu"}'], {"pt_load_map_location": {"cuda": "cpu"}}),
        (["--compilation-config", '{"mode": 3}'], {"compilation_config": {"mode": 3}}),
        ("-cc 3", {"compilation_config": 3}),
        (["-cc", '{"mode": 3}'], {"compilation_config": {"mode": 3}}),
        ("-cc.mode=3", {"compilation_config": {"mode": 3}}),
        ("-cc.mode 3", {"compilation_config": {"mode": 3}}),
        ("--compilation_config.mode=3", {"compilation_config": {"mode": 3}}),
        ("-cc.mode=3 --compilation-config.cudagraph_mode FULL", {
            "compilation_config": {"mode": 3, "cudagraph_mode": "FULL"}
        }),
        ("-cc.pass_config.enable_sp true -cc.backend eager", {
            "compilation_config": {"pass_config": {"enable_sp": True}, "backend": "eager"}
        }),
        ("--hf-overrides.a.b.c=1 --hf_overrides.a.b.d=x --hf-overrides.e None", {
            "hf_overrides": {"a": {"b": {"c": 1, "d": "x"}}, "e": None}
        }),
        ("-cc.custom_ops+ +norm -cc.custom_ops+ -silu", {"compilation_config": {"custom_ops": ["+norm", "-silu"]}}),
        ("-cc.custom_ops+=a,b -cc.custom_ops+ c", {"compilation_config": {"custom_ops": ["a", "b", "c"]}}),
        ("-cc.compile_sizes+ 1 -cc.compile_sizes+=2,3", {"compilation_config": {"compile_sizes": [1, 2, 3]}}),
        (["-cc", '{"mode": 1, "backend": "x"}', "-cc.mode=3"], {"compilation_config": {"mode": 3, "backend": "x"}}),
        (["-cc.mode=3", "-cc", '{"backend": "x"}'], {"compilation_config": {"backend": "x"}}),
        ("--structured-outputs-config.backend xgrammar", {"structured_outputs_config": {"backend": "xgrammar"}}),
        ("--speculative_config.num_speculative_tokens 4", {"speculative_config": {"num_speculative_tokens": 4}}),
        ("--override-generation-config.temperature 0.5", {"override_generation_config": {"temperature": 0.5}}),
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_forms(parser: FlexibleArgumentParser, line: str | list[str], expected: dict[str, Any]) -> None:
    assert changed(parser, line) == expected


@pytest.mark.parametrize(
    "text, number",
    [
        ("0", 0), ("4096", 4096), ("-1", -1), ("1k", 1000), ("1K", 1024), ("1m", 10**6), ("1M", 1 << 20),
        ("2g", 2 * 10**9), ("2G", 2 << 30), ("1t", 10**12), ("1T", 1 << 40), ("25.6k", 25600), (".5k", 500),
        ("0.001k", 1), ("1.5g", 1_500_000_000), ("12.345678m", 12345678),
    ],
)  # fmt: skip
def test_human_numbers(text: str, number: int) -> None:
    assert human_readable_int(text) == number == human_readable_int_or_auto(text)


@pytest.mark.parametrize("text", ["", "x", "1.5", "1.5K", "1kk", "1 k", "0x10", "1e3", "1.0001k", "auto", "k"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int(text)


def test_a_fraction_of_1024_suggests_the_small_letter() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write 25\.6k"):
        human_readable_int("25.6K")
    assert human_readable_int_or_auto("AUTO") == -1


@pytest.mark.parametrize(
    "line, words",
    [
        ("--max-num-seq 4", "did you mean --max-num-seqs?"),
        ("--max_num_seq 4", "did you mean --max-num-seqs?"),
        ("--enable-prefx-caching", "did you mean --enable-prefix-caching?"),
        ("--max-model", "unrecognized arguments: --max-model"),
        ("--scheduling-policy lifo", "invalid choice: 'lifo' (choose from"),
        ("--max-model-len 1.5K", "write 1.5k for powers of 1000"),
        ("--max-num-seqs many", "invalid int value: 'many'"),
        ("--max-num-seqs", "expected one argument"),
        ("-cc {", "is not JSON"),
        ("-cc.mode", "-cc.mode needs a value"),
        ("-cc 3 -cc.mode 2", "can only be added to a JSON object"),
        ("-cc.a 1 -cc.a.b 2", "'a' already holds 1"),
        ("-cc.a 1 -cc.a+ 2", "which is not a list"),
        ("--max-lora-rank 7", "invalid choice: 7"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_complaints(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    said = complaint(parser, line, capsys)
    assert words in said
    assert len(said.splitlines()) < 6, "the usage of 300 options is not shown for one mistake"


def test_values_are_left_alone(parser: FlexibleArgumentParser) -> None:
    assert changed(parser, ["--model", "my_model/some_name.v1"]) == {"model": "my_model/some_name.v1"}
    assert changed(parser, ["--model=a_b=c"]) == {"model": "a_b=c"}
    own = FlexibleArgumentParser()
    own.add_argument("--with_line", type=int)
    own.add_argument("rest", nargs="*")
    assert vars(own.parse_args(["--with-line", "3", "--", "--with_line"])) == {"with_line": 3, "rest": ["--with_line"]}


# Files


def write(folder: Path, text: str, name: str = "options.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


YAML = """
model: some/model
max_num_seqs: 4
max-model-len: 32k
kv-cache-memory-bytes: 2G
enable-prefix-caching: false
enforce_eager: true
served-model-name: [a, b]
allowed-media-domains: one.host
gpu-memory-utilization: 0.5
hf-overrides:
  rope_parameters: {factor: 2}
  list: [1, 2]
compilation-config: {mode: 0, backend: eager}
safetensors-load-strategy: null
hf-token: true
"""


def test_file(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    assert changed(parser, ["--config", path]) == {
        "model": "some/model",
        "max_num_seqs": 4,
        "max_model_len": 32000,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "served_model_name": ["a", "b"],
        "allowed_media_domains": ["one.host"],
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"rope_parameters": {"factor": 2}, "list": [1, 2]},
        "compilation_config": {"mode": 0, "backend": "eager"},
        "hf_token": True,
    }
    assert changed(parser, []) == {}, "the file is gone with its command line"


def test_command_line_wins_over_file_and_file_over_defaults(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    parser.set_defaults(max_num_seqs=9, seed=5)
    line = f"--max-num-seqs 8 --config={path} --enable-prefix-caching --served-model-name c -cc.backend=x"
    found = vars(parser.parse_args([*line.split(), "--no-enforce-eager"]))
    assert (found["max_num_seqs"], found["enable_prefix_caching"], found["served_model_name"]) == (8, True, ["c"])
    assert found["compilation_config"] == {"mode": 0, "backend": "x"} and found["enforce_eager"] is False
    assert (found["max_model_len"], found["seed"]) == (32000, 5)
    assert vars(parser.parse_args(["--config", path]))["max_num_seqs"] == 4
    assert vars(parser.parse_args([]))["max_num_seqs"] == 9


def test_file_fills_positionals(tmp_path: Path) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    EngineArgs.add_cli_args(parser)
    path = write(tmp_path, "model-tag: from-file\nallowed-media-domains: [a, b]\n")
    assert parser.parse_args(["--config", path]).model_tag == "from-file"
    found = parser.parse_args(["--config", path, "from-line"])
    assert (found.model_tag, found.allowed_media_domains) == ("from-line", ["a", "b"])


def repeated(form: str) -> str:
    """A million values by six aliases."""
    values = [f"{level}: &x{level} {form.format(','.join([f'*x{level - 1}'] * 10))}" for level in range(1, 7)]
    return "{" + ", ".join(["0: &x0 {a: 1}", *values]) + "}"


@pytest.mark.parametrize(
    "text, words",
    [
        ("max-num-seq: 3", "there is no option 'max-num-seq' (did you mean --max-num-seqs?)"),
        ("max-num-seqs: many", "invalid int value: 'many'"),
        ("scheduling-policy: lifo", "invalid choice: 'lifo'"),
        ("enforce-eager: 3", "enforce-eager must be true or false, got 3"),
        ("[1, 2]", "expected a mapping of option names to values, got list"),
        ("a: [1", "not readable as YAML"),
        ("3", "expected a mapping of option names to values, got int"),
        ("seed: 1\nmax-num-seqs: 4\nseed: 2", "'seed' is given twice"),
        ("max-num-seqs: 4\nmax_num_seqs: 8", "'max_num_seqs' is the same option as 'max-num-seqs'"),
        ("enforce-eager: true\nno-enforce-eager: true", "'no-enforce-eager' is the same option as 'enforce-eager'"),
        ("help: true", "there is no option 'help'"),
        ("seed: 2026-01-01", "invalid int value: '2026-01-01'"),
        ("seed: !!binary aGk=", "seed holds what is not JSON (Object of type bytes is not JSON serializable)"),
        ("hf-overrides: {a: !!binary aGk=}", "hf-overrides holds what is not JSON"),
        ("hf-overrides: &x [*x]", "hf-overrides holds what is not JSON (Circular reference"),
        ("seed: !!int many", "a value is not of the type that the file says"),
        ("enforce-eager: !!bool maybe", "a value is not of the type that the file says"),
        ("seed: !!timestamp soon", "a value is not of the type that the file says"),
        pytest.param("seed: " + "9" * 5000, "a value is not of the type", id="5,000 digits"),
        pytest.param("hf-overrides: " + "[" * 5000 + "]" * 5000, "nested too deep", id="5,000 brackets"),
        pytest.param(f"hf-overrides: {repeated('[{}]')}", "more than 100000 values", id="aliases"),
        pytest.param(f"hf-overrides: {repeated('{{<<: [{}]}}')}", "more than 100000 values", id="merged aliases"),
        ("1: a\n1.0: b", "'1.0' is given twice"),
        ("tp: 2", "there is no option 'tp' (did you mean tensor-parallel-size?)"),
        ("hf-overrides.: 2", "there is no option 'hf-overrides.'"),
        ("hf-override.a: 2", "there is no option 'hf-override.a' (did you mean --hf-overrides?)"),
        ("hf-overrides.a: 2\nhf_overrides.a: 3", "'hf_overrides.a' is the same option as 'hf-overrides.a'"),
        ("hf-overrides.a: 2\nhf-overrides.a.b: 3", "'a' already holds 2"),
        ("hf-overrides: 3\nhf-overrides.a: 2", "keys such as --hf-overrides.key can only be added to a JSON object"),
        ("hf-overrides.a: !!binary aGk=", "hf-overrides holds what is not JSON"),
        ("seed.a: 2", "invalid int value"),
        ("enforce-eager.a: true", "enforce-eager must be true or false, got {'a': True}"),
    ],
)
def test_wrong_files(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    assert words in complaint(parser, ["--config", path], capsys)


def test_keys_of_a_mapping_in_a_file(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    """As on the command line: beside the mapping, without it, and below what the command line says."""
    text = """
        compilation-config.mode: 0
        compilation_config: {mode: 3, backend: eager}
        hf-overrides.rope_parameters.factor: 2
        hf-overrides.list+: 1,2
        hf-overrides.name: "yes"
        hf-overrides.nothing: null
    """
    path = write(tmp_path, "\n".join(map(str.strip, text.splitlines())))
    overrides = {"rope_parameters": {"factor": 2}, "list": [1, 2], "name": "yes", "nothing": None}
    assert changed(parser, ["--config", path]) == {
        "compilation_config": {"mode": 0, "backend": "eager"},
        "hf_overrides": overrides,
    }
    found = parser.parse_args(["--config", path, "-cc.mode=1", "--hf-overrides.name=no"])
    assert found.compilation_config == {"mode": 1, "backend": "eager"}
    assert found.hf_overrides == overrides | {"name": "no"}
    path = write(tmp_path, """compilation-config: '{"mode": 3}'\ncompilation-config.backend: eager""")
    assert parser.parse_args(["--config", path]).compilation_config == {"mode": 3, "backend": "eager"}


def test_a_negated_option_in_a_file_negates(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    for value in (True, False):
        path = write(tmp_path, f"no-enable-prefix-caching: {str(value).lower()}\nno_enforce_eager: false")
        found = parser.parse_args(["--config", path])
        assert (found.enable_prefix_caching, found.enforce_eager) == (not value, True)


def test_a_date_in_a_file_is_text(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    found = parser.parse_args(
        ["--config", write(tmp_path, "served-model-name: 2026-01-01\nhf-overrides: {a: 2026-01-01}")]
    )
    assert found.served_model_name == ["2026-01-01"] and found.hf_overrides == {"a": "2026-01-01"}


def test_what_libraries_do_to_pyyaml_does_not_count(
    parser: FlexibleArgumentParser,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = SafeLoader.yaml_constructors
    for name in ("timestamp", "int"):  # as lm-format-enforcer does on import
        monkeypatch.setitem(forms, f"tag:yaml.org,2002:{name}", forms["tag:yaml.org,2002:str"])
    assert parser.parse_args(["--config", write(tmp_path, "hf-overrides: {a: 7}")]).hf_overrides == {"a": 7}
    wrong = complaint(parser, ["--config", write(tmp_path, "seed: !!timestamp soon")], capsys)
    assert "a value is not of the type that the file says" in wrong


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_a_file_without_options(parser: FlexibleArgumentParser, tmp_path: Path, text: str) -> None:
    assert changed(parser, ["--config", write(tmp_path, text)]) == {}


def test_missing_files(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no file" in complaint(parser, ["--config", "nowhere.yaml"], capsys)
    assert "needs a .yaml" in complaint(parser, ["--config", write(tmp_path, "a: 1", "x.txt")], capsys)
    path = write(tmp_path, "seed: 1")
    assert "given only once" in complaint(parser, ["--config", path, "--config", path], capsys)


def test_json_files_and_own_config_flags(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    assert changed(parser, ["--config", write(tmp_path, json.dumps({"seed": 4}), "o.json")]) == {"seed": 4}
    own = FlexibleArgumentParser()
    own.add_argument("--config")
    assert own.parse_args(["--config", "fast"]).config == "fast"


# Commands and help


def commands() -> FlexibleArgumentParser:
    top = FlexibleArgumentParser(prog="quire")
    below = top.add_subparsers(dest="command")
    serve = below.add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    AsyncEngineArgs.add_cli_args(serve)
    below.add_parser("other").add_argument("--word")
    return top


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = commands()
    path = write(tmp_path, "max_num_seqs: 4\nseed: 3\n")
    found = top.parse_args(["serve", "m", "--config", path, "--max_model_len", "4k", "-cc.mode=0", "--seed", "5"])
    assert (found.model_tag, found.max_num_seqs, found.max_model_len, found.seed) == ("m", 4, 4000, 5)
    assert found.compilation_config == {"mode": 0}
    assert "did you mean --max-num-seqs?" in complaint(top, "serve --max-num-seq 3", capsys)


def shown(parser: argparse.ArgumentParser, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split())
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help(parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    parser.add_argument("--mine", help="my own flag")
    plain = shown(parser, "--help", capsys)
    assert "--mine" in plain and "--help=CacheConfig" in plain and "--block-size" not in plain
    group = shown(parser, "--help=cacheconfig", capsys)
    assert "--block-size" in group and "--max-num-seqs" not in group
    found = shown(parser, "--help=max_num_seqs", capsys)
    assert "--max-num-seqs" in found and "--block-size" not in found
    assert "Must be at least 1" in " ".join(found.split())
    everything = shown(parser, "--help=all", capsys)
    assert all(f"--{word}" in everything for word in ("mine", "block-size", "max-num-seqs"))
    assert "Did you mean --help=CacheConfig?" in shown(parser, "--help=CacheConfg", capsys)
    absent = shown(parser, "--help=prefill-context-parallel-size", capsys)
    assert "Not available in this version: --prefill-context-parallel-size" in absent
    assert "--prefill-context-parallel-size" not in everything
    assert "No effect: a preempted request is" in " ".join(shown(parser, "--help=swap-space", capsys).split())
    patterns = shown(parser, "--help=ignore-patterns", capsys)
    assert "Default: original/**/*." in " ".join(patterns.split())
    assert "--word" in shown(commands(), "other --help", capsys)
    assert "--block-size" in shown(commands(), "serve --help=CacheConfig", capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Words of other programs


@pytest.mark.parametrize(
    "line, says",
    [
        ("-m model.gguf", "name the model without a flag"),
        ("-c 4096", "--max-model-len"),  # and not the beginning of -cc
        ("--ctx-size 4096", "--max-model-len"),
        ("--ctx_size=4096", "--max-model-len"),
        ("--n-gpu-layers 99", "--device cpu"),
        ("-ngl 99", "--device cpu"),
        ("-np 4", "--max-num-seqs"),
        ("--task embed", "--runner"),
        ("--enable-reasoning", "--reasoning-parser"),
        ("--guided-decoding-backend auto", "--structured-outputs-config"),
        ("--num_scheduler_steps 8", "--async-scheduling"),
        ("--use-v2-block-manager", "leave it out"),
        ("--worker-use-ray", "--distributed-executor-backend"),
    ],
)
def test_flags_of_other_programs_say_what_to_use(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(line.split())
    told = capsys.readouterr().err
    assert ended.value.code == 2 and says in told and f"there is no flag {line.split()[0].partition('=')[0]}:" in told


def test_each_of_several_foreign_flags_is_explained(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["-m", "x.gguf", "-c", "4096", "-ngl", "99"])
    told = capsys.readouterr().err
    assert "without a flag" in told and "--max-model-len" in told and "--device cpu" in told


def test_a_long_flag_does_not_mean_a_short_one(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("-asc")
    assert parser.nearest(["--asca"]) == "" and parser.nearest(["-asca"]) == " (did you mean -asc?)"


def test_a_flag_that_a_parser_has_is_its_own(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("-m", "--mine")
    assert parser.parse_args(["-m", "x"]).mine == "x"


def test_hints_name_flags_that_exist() -> None:
    """Whatever a hint names can be typed."""
    import re

    from quire.cli.client import make_parser as make_chat
    from quire.cli.serve import make_parser as make_serve
    from quire.config.foreign import _MEANT

    known = {flag for made in (make_serve("x"), make_chat("x", "")) for a in made._actions for flag in a.option_strings}
    named = {flag for words in _MEANT.values() for flag in re.findall(r"--[a-z][a-z-]+", words)}
    assert named and named <= known
    assert not set(_MEANT) & {flag for a in make_serve("x")._actions for flag in a.option_strings}
