"""One start, from nothing to the first token, in a process of its own. `quire bench startup` runs it, reads its report.

    python -m quire.bench.startup_child REPORT SPAWNED [engine options]

SPAWNED is the parent's clock when it started this process (the monotonic clock is one for the whole machine). Modules
are loaded one stage after another, so that each stage can be timed.
"""

from __future__ import annotations

import json
import sys

from quire.base.clock import Laps, now
from quire.base.registry import load

PROMPT = "The sky is"


def main(arguments: list[str]) -> None:
    entered = now()
    path, spawned, *options = arguments
    laps = Laps()
    phases: list[tuple[str, float, str]] = [("interpreter", entered - float(spawned), "")]
    from quire.config import FlexibleArgumentParser  # lazy

    parser = FlexibleArgumentParser()
    from quire.llm.engine import LLMEngine  # lazy

    engine_class = LLMEngine
    from quire.schema.params import SamplingParams  # lazy

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    laps.mark("import quire")
    from quire.config import EngineArgs  # lazy

    engine_args = EngineArgs
    engine_args.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True, use_tqdm_on_load=False)
    config = engine_args.from_cli_args(parser.parse_args(options)).create_engine_config()
    laps.mark("config")
    load("torch:__version__")
    laps.mark("import torch")
    phases += laps.taken
    began = now()
    engine = engine_class(config)
    built = now() - began
    inside = [(phase.name, phase.seconds, phase.inside) for phase in engine.front.ready.phases]
    phases += inside
    phases.append(("tokenizer and front", built - sum(seconds for _, seconds, around in inside if not around), ""))
    began = now()
    prompt = PROMPT if engine.tokenizer is not None else {"prompt_token_ids": [1, 2, 3]}
    engine.add_request("first", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    phases.append(("first token", now() - began, ""))
    total = now() - float(spawned)
    facts = {"phases": phases, "total": total, "ready": total - phases[-1][1], "weights": config.model_config.path}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(facts, file)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
