"""LLM.beam_search over many prompts: rounds of requests of one token, for all searches of a group at once.

In: an engine, and how an LLM prepares and runs requests. Out: a BeamSearchOutput per prompt, in their order. Must not
know: which beams go on (beam.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from quire.engine.inputs import Options, PreparedRequest
from quire.llm.beam import BeamSearchInstance, BeamSearchOutput, check_ranks, followed
from quire.llm.beam_form import BeamForm, BeamForms
from quire.llm.beam_limits import BeamLimits
from quire.llm.progress import Progress
from quire.schema.adapters import LoRARequest
from quire.schema.errors import make_each
from quire.schema.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.llm.engine import LLMEngine


class BeamCalls:
    def __init__(
        self,
        engine: LLMEngine,
        prepare: Callable[[Any, SamplingParams, Options], PreparedRequest],
        run: Callable[[list[PreparedRequest], Any], list[Any]],
    ) -> None:
        check_ranks(engine.model_config.logprobs_mode)
        self._engine, self._prepare, self._run = engine, prepare, run
        self._vocab_size = engine.input_processor.vocab_size

    def search(
        self,
        prompts: list[Any],
        params: BeamSearchParams,
        adapters: Sequence[LoRARequest | None],
        use_tqdm: Any,
        concurrency_limit: int | None,
    ) -> list[BeamSearchOutput]:
        options = [Options(lora_request=lora, any_logprobs=True) for lora in adapters]
        form = None if params.structured_outputs is None else self._form(params.structured_outputs)
        searches = make_each(
            "prompts", list(zip(prompts, options, strict=True)), lambda one: self._search(one[0], params, one[1], form)
        )
        lengths = [search.max_tokens for search in searches]
        BeamLimits().check(params.beam_width, lengths, 0, self._vocab_size)
        progress = Progress.make(use_tqdm, total=len(searches), words="Beam search")
        size = concurrency_limit or max(1, len(searches))
        with closing(progress):
            for first in range(0, len(searches), size):
                here = slice(first, first + size)
                self._run_searches(list(zip(searches[here], options[here], strict=True)), progress)
        return [self._finish_search(search) for search in searches]

    def _form(self, structured_outputs: StructuredOutputsParams) -> BeamForm:
        forms = BeamForms(self._engine.vllm_config, self._vocab_size)
        try:
            return forms.make(structured_outputs)
        finally:
            forms.close()

    def _search(
        self, prompt: Any, params: BeamSearchParams, options: Options, form: BeamForm | None
    ) -> BeamSearchInstance:
        prepared = self._prepare(prompt, SamplingParams(max_tokens=params.max_tokens), options)
        return BeamSearchInstance.of(prepared, params, form)

    def _run_searches(self, searches: list[tuple[BeamSearchInstance, Options]], progress: Progress) -> None:
        """Each round extends every live beam of every search by one request of one token."""
        live = [(search, options) for search, options in searches if not search.done]
        while live:
            requests = []
            for search, options in live:
                for tokens, params in search.questions(self._vocab_size):
                    requests.append(self._prepare(search.prompt(tokens), params, options))
            results = iter(self._run(requests, False))
            for search, _ in live:
                search.advance([followed(next(results)) for _ in list(search.beams)])
                if search.done:
                    progress.advance()
            live = [(search, options) for search, options in live if not search.done]

    def _finish_search(self, search: BeamSearchInstance) -> BeamSearchOutput:
        output = search.output()
        tokenizer = self._engine.tokenizer
        for sequence in output.sequences:
            if tokenizer is not None:
                hides_end = sequence.stop_reason is not None and not search.params.include_stop_str_in_output
                shown = sequence.tokens[:-1] if hides_end else sequence.tokens
                sequence.text = tokenizer.decode(
                    shown, skip_special_tokens=not search.params.include_stop_str_in_output
                )
        return output
