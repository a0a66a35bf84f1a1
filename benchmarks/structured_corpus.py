"""Constrained answers of the embedded model over a corpus, every finished one judged: schemas, regexes and grammars.

    pip download --no-binary jsonschema --no-deps jsonschema==4.26.0
    python -m benchmarks.structured_corpus --suite jsonschema-4.26.0.tar.gz
Half of the schemas are from the JSON Schema Test Suite (the archive holds it), half are made at random. What nobody
enforces to the letter is refused by name, and counted. Times are processor time, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import statistics
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from quire import LLM, SamplingParams
from quire.engine.masking import make_masks
from quire.grammar.backend import Backend, make_backend
from quire.grammar.request import make_spec
from quire.schema.errors import InputError, QuireError
from quire.schema.outputs import CompletionOutput
from quire.schema.params import StructuredOutputsParams as Constraint
from tests.engine.schema_corpus import GRAMMARS, MORE_GRAMMARS, MORE_REGEXES, REGEXES, SCHEMAS, random_schema

PROMPT = "Answer with one example, as short as possible:"
TOKENS = 80
BATCH = 32
_ELSEWHERE = ('"$id"', '"$anchor"', "http:", "https:", "urn:")  # the judge would have to fetch what they refer to


@dataclass
class Case:
    given: dict[str, Any]
    accepts: Callable[[str], bool]


def schema_case(schema: Any) -> Case:
    judge = jsonschema.Draft202012Validator(schema, format_checker=None)
    return Case({"json": schema}, lambda text: judge.is_valid(json.loads(text)))


def suite_schemas(archive: str) -> list[Any]:
    found = []
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if "/json/tests/draft2020-12/" in member.name and "/optional/" not in member.name and member.isfile():
                content = files.extractfile(member)
                assert content is not None
                found += [group["schema"] for group in json.load(content)]
    bare = [{k: v for k, v in schema.items() if k != "$schema"} for schema in found if isinstance(schema, dict)]
    unique = {json.dumps(schema, sort_keys=True): schema for schema in bare}
    return [schema for text, schema in unique.items() if not any(word in text for word in _ELSEWHERE)]


def taken(llm: LLM, cases: list[Case], refused: collections.Counter[str]) -> list[Case]:
    """Those that are not refused, at once or when they are compiled."""
    options, waiting = llm.llm_engine.vllm_config.structured_outputs_config, []
    compiler = llm.llm_engine.front.client.loop.masks.compiler
    for case in cases:
        try:
            spec = make_spec(Constraint(**case.given), options)
            compiler.submit(spec)
            waiting.append((case, spec))
        except InputError as wrong:
            refused[re.sub(r" at '#[^']*'", "", str(wrong))[:70]] += 1
    kept = []
    for case, spec in waiting:
        while (found := compiler.fetch(spec)) is None:
            time.sleep(0.01)
        if isinstance(found, QuireError):
            refused[str(found)[:70]] += 1
        else:
            kept.append(case)
    return kept


def answer(llm: LLM, cases: list[Case]) -> list[tuple[Case, CompletionOutput]]:
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=TOKENS, structured_outputs=Constraint(**case.given))
        for i, case in enumerate(cases)
    ]
    results = llm.generate([PROMPT] * len(cases), params, use_tqdm=False)
    return [(case, result.outputs[0]) for case, result in zip(cases, results, strict=True)]


def report(name: str, found: list[tuple[Case, CompletionOutput]], refused: collections.Counter[str]) -> bool:
    ended = [(case, output) for case, output in found if output.finish_reason == "stop"]
    wrong = [(case.given, output.text) for case, output in ended if not case.accepts(output.text)]
    right = len(ended) - len(wrong)
    print(
        f"{name:10} {len(found):4} answered, {len(ended):4} finished, {right:4} valid; {sum(refused.values())} refused"
    )
    for given, text in wrong:
        print(f"    WRONG {json.dumps(given)[:200]} -> {text[:200]!r}")
    for reason, count in refused.most_common(8):
        print(f"    {count:4} refused: {reason}")
    return not wrong


def compile_times(llm: LLM, cases: list[Case]) -> None:
    """Processor time of one compile, by backend, in this process."""
    engine = llm.llm_engine
    vocabulary = make_masks(engine.vllm_config, engine.front.ready.vocab_size).compiler.vocabulary()
    backends: dict[str, Backend] = {}
    times: dict[str, list[float]] = {}
    for case in cases:
        spec = make_spec(Constraint(**case.given), engine.vllm_config.structured_outputs_config)
        name = spec.backends[0]
        if name not in backends:
            backends[name] = make_backend(name, vocabulary)
        began = time.process_time()
        try:
            backends[name].load(spec, backends[name].compile(spec))
        except ValueError:
            continue
        times.setdefault(name, []).append((time.process_time() - began) * 1e3)
    for name, taken_ms in times.items():
        print(f"compile with {name}: {len(taken_ms)} constraints, median {statistics.median(taken_ms):.1f} ms, "
              f"most {max(taken_ms):.0f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", help="jsonschema-*.tar.gz, whose test suite is half of the schemas")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    llm = LLM(max_model_len=512, max_num_seqs=BATCH, num_gpu_blocks_override=1000)
    dice, began = random.Random(asked.seed), time.process_time()
    refused: collections.Counter[str] = collections.Counter()
    public = [schema_case(schema) for schema in suite_schemas(asked.suite)] if asked.suite else []
    dice.shuffle(public)
    cases = taken(llm, public, refused)[: asked.schemas // 2]
    cases += [schema_case(schema) for schema in SCHEMAS]
    while len(cases) < asked.schemas:
        cases.append(schema_case(random_schema(dice)))
    good = report("schemas", answer(llm, taken(llm, cases, refused)), refused)
    kinds = {
        "regexes": [Case({"regex": r}, re.compile(r).fullmatch) for r in (*REGEXES, *MORE_REGEXES)],  # type: ignore[arg-type]
        "grammars": [Case({"grammar": g}, words.__contains__) for g, words in GRAMMARS.items()]
        + [Case({"grammar": g}, re.compile(r).fullmatch) for g, r in MORE_GRAMMARS.items()],  # type: ignore[arg-type]
    }
    for name, some in kinds.items():
        none: collections.Counter[str] = collections.Counter()
        good = report(name, answer(llm, taken(llm, some, none)), none) and good
    compile_times(llm, cases)
    print(f"{time.process_time() - began:.0f} s of processor time")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
