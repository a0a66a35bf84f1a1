"""One stream with speculative decoding beside one without, in turns: python benchmarks/cpu/speculative.py --rounds 5

Three tasks for the embedded model: `edit` (the answer repeats its prompt with changes), `prose` (sampled text that
repeats nothing) and `agent` (a loop whose turns look alike, each with what came before as its prompt). Both engines
live in this process and answer the same requests, first one, then the other, so that a machine that others use is the
same for both. Every round has texts of its own, so that nothing can be known from the round before. Answers are
compared: in greedy tasks both must say the same unless two tokens are equally likely, which is counted. Prompts are
in the prefix cache when the time is taken. Figures are medians of rounds; of processor time too, because the machine
may be busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.observe.reader import Counter

NAMES = ["Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Katya", "Luis"]
PLACES = ["library", "harbour", "station", "museum", "orchard", "factory", "school", "theatre", "market", "bridge"]
THINGS = ["lamps", "clocks", "maps", "engines", "violins", "letters", "kites", "lenses", "boats", "coins"]
STORY = (
    "The old {place} stood at the corner of two quite streets. {name} came every morning to repair its "
    "{thing}, which had been brought there by sailors long ago. She began with the smallest of them, "
    "which had lost most of its brass, and wrote evry step into a book. When it rained, the roof dripped "
    "on the shelves, and she carried the {thing} to the cellar, where they stayed dry. In the evening her "
    "brother came with bread and cheese, and they talked about the people who had owned the {thing} "
    "before them. Nobody in the town knew how many {thing} there were, becuse nobody had ever counted "
    "them."
)
TURN = """Thought: I have to look at file number {i} of the {place} to find the {thing}.
Action: read_file
Action Input: {{"path": "/{place}/{thing}/part_{i}.txt", "encoding": "utf-8", "lines": 20}}
Observation: the file lists {n} {thing} owned by {name}.
"""
METHODS = {
    "edit": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "prose": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "agent": {"method": "suffix", "num_speculative_tokens": 15},
}


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def words(number: int) -> dict[str, str]:
    thing = THINGS[number % len(THINGS)]
    place, name = PLACES[number * 3 % len(PLACES)], NAMES[number * 5 % len(NAMES)]
    return {"thing": thing, "place": place, "name": name}


def edit(number: int) -> tuple[str, SamplingParams]:
    task = "Fix the spelling mistakes in this text and repeat everything else exactly"
    prompt = chat(f"{task}:\n\n{STORY.format(**words(number))}") + "Here is the corrected text:\n\n"
    return prompt, SamplingParams(temperature=0.0, max_tokens=180)


def prose(number: int) -> tuple[str, SamplingParams]:
    said = words(number)
    text = f"Write a story about {said['name']}, who repairs {said['thing']} in a {said['place']}."
    return chat(text), SamplingParams(temperature=0.8, top_p=0.95, seed=number, max_tokens=160, ignore_eos=True)


def agent(number: int) -> tuple[str, SamplingParams]:
    """The end of a long loop: five turns were taken, and four more are to come."""
    said = words(number)
    turns = "".join(TURN.format(i=i, n=3 * i + number, **said) for i in range(1, 6))
    return f"Task: count all {said['thing']}.\n{turns}Thought:", SamplingParams(
        temperature=0.0, max_tokens=200, ignore_eos=True
    )


DRAFTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
TASKS = {"edit": edit, "prose": prose, "agent": agent}
DRAFT_TASKS = {"edit": edit, "prose": prose}


def answer(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[int], float, float]:
    """Tokens, seconds and processor seconds; the prompt is cached before."""
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    began, used = time.perf_counter(), time.process_time()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return list(output.outputs[0].token_ids), time.perf_counter() - began, time.process_time() - used


def counted(llm: LLM) -> dict[str, int]:
    named = {metric.name.rpartition("spec_decode_")[2]: metric for metric in llm.get_metrics()}
    counters = (named[name] for name in DRAFTED)
    return {name: metric.value for name, metric in zip(DRAFTED, counters, strict=True) if isinstance(metric, Counter)}


def measure(task: str, rounds: int, options: dict[str, Any], speculative: dict[str, Any]) -> dict[str, Any]:
    plain = LLM(**options)
    drafting = LLM(**options, speculative_config=speculative, disable_log_stats=False)
    rows, same, num_tokens = [], 0, 0
    for number in range(rounds + 1):
        prompt, params = TASKS[task](number)
        pair = [answer(llm, prompt, params) for llm in ((plain, drafting) if number % 2 else (drafting, plain))]
        one, other = pair if number % 2 else pair[::-1]
        if not number:
            before = counted(drafting)
            continue  # both are warm now
        rows.append((one[1] / other[1], one[2] / other[2], one[2] / len(one[0]), other[2] / len(other[0])))
        num_tokens += len(one[0])
        same += sum(a == b for a, b in zip(one[0], other[0], strict=True))
    wall, processor, ms_plain, ms_drafting = (statistics.median(column) for column in zip(*rows, strict=True))
    drafts = {name: value - before[name] for name, value in counted(drafting).items()}
    return {
        "task": task, "method": speculative["method"], "load": round(os.getloadavg()[0], 1),
        "speed-up (wall)": round(wall, 2),
        "speed-up (processor)": round(processor, 2), "plain, ms of processor per token": round(1000 * ms_plain, 2),
        "drafting, ms of processor per token": round(1000 * ms_drafting, 2), "tokens equal": f"{same}/{num_tokens}",
        "speed-ups of rounds (processor)": [round(row[1], 2) for row in rows], **drafts,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--model", default=None)
    parser.add_argument("--draft", help="a draft model for edit and prose, instead of n-grams and suffixes")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--draft-quantization", help="of the draft model")
    parser.add_argument("--every-draft", action="store_true", help="draft and verify whatever it costs")
    options = parser.parse_args()
    given: dict[str, Any] = {"max_model_len": 2048} | ({"model": options.model} if options.model else {})
    for task in options.tasks if options.draft is None else [name for name in options.tasks if name in DRAFT_TASKS]:
        speculative = METHODS[task]
        if options.draft is not None:
            speculative = {
                "method": "draft_model", "model": options.draft, "num_speculative_tokens": options.draft_tokens,
                "adaptive": not options.every_draft, "quantization": options.draft_quantization,
            }  # fmt: skip
        print(json.dumps(measure(task, options.rounds, given, speculative), indent=1), flush=True)


if __name__ == "__main__":
    main()
