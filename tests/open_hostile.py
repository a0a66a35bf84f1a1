"""Opens one model as a user would, and says how that ended. For tests/fuzz_files.py, in a process of its own."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.schema.errors import EngineDeadError, EngineGenerateError, QuireError

LONGEST = 4000  # characters of an error
NO_NUMBERS = "logits that are not numbers"  # what weights of any bytes may come to
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 96 << 20, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64,
    "device": "cpu", "disable_log_stats": True,
}  # fmt: skip


class Opener:
    def __init__(self) -> None:
        self._count = 0

    def open(self, path: Path) -> tuple[str, bool]:
        """(how it ended, whether that is allowed)."""
        try:
            return f"answered: {self.answer(path)}", True
        except QuireError as refused:
            name, said = type(refused).__name__, str(refused)
            if isinstance(refused, EngineDeadError | EngineGenerateError) and NO_NUMBERS not in said:
                return f"{name}: {said[:300]}: {_where(refused)}", False
            if len(said) > LONGEST:
                return f"{name} of {len(said)} characters: {said[:200]}", False
            return f"{name}: {said}", bool(said)
        except BaseException as wrong:  # noqa: BLE001  # anything but a refusal is what the fuzzer is looking for
            return f"{type(wrong).__name__}: {str(wrong)[:300]}: {_where(wrong)}", False

    def answer(self, path: Path) -> str:
        """Of two tokens; as the options of several starts would have it, in turn."""
        self._count += 1
        options = dict(OPTIONS)
        if self._count % 2:
            del options["max_model_len"]
        llm = LLM(str(path), **options)
        try:
            greedy = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            drawn = SamplingParams(max_tokens=2, temperature=0.9, top_k=7, top_p=0.8, min_p=0.01, logprobs=2, seed=1)
            made = llm.generate([PROMPT, PROMPT], [greedy, drawn], use_tqdm=False)
            return str([list(one.outputs[0].token_ids) for one in made])
        finally:
            llm.close()


def _where(wrong: BaseException) -> str:
    """The last of Quire's own lines on the way, and that of whatever came before."""
    frames = [frame for frame in traceback.extract_tb(wrong.__traceback__) if "/quire/" in frame.filename]
    last = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
    before = wrong.__cause__ or wrong.__context__
    return last if before is None else f"{last} after {type(before).__name__} {str(before)[:200]} {_where(before)}"
