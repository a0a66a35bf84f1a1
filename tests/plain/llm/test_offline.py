"""llm/offline.py and stepper.py over an engine that repeats its prompt, in process and in a process of its own."""

from __future__ import annotations

import dataclasses
import functools
import gc
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from quire import LLM, EngineArgs, LLMEngine, SamplingParams
from quire.base import env
from quire.engine.client import CLOSED, InProcessClient
from quire.schema.errors import ConfigError, EngineDeadError, EngineGenerateError, InputError, NotBuiltError
from quire.schema.params import RequestOutputKind
from tests.fake_engine import ids_of, name_of_model, use_fake, write_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    return write_model(tmp_path)


@pytest.fixture(params=["0", "1"], ids=["in process", "own process"])
def llm(request, folder, monkeypatch):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", request.param)
    env.forget_all()
    made = LLM(folder, max_num_seqs=8, max_model_len=64)
    yield made
    made.close()


@pytest.fixture
def inside(folder):
    made = LLM(folder, max_num_seqs=8, max_model_len=64)
    yield made
    made.close()


SHORT = SamplingParams(max_tokens=5)


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_answers_come_in_order(llm):
    prompts = [c * (i % 5 + 1) for i, c in enumerate("abcdefghijklmnop")]
    params = [SamplingParams(max_tokens=16 - i) for i in range(16)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert texts(outputs) == [c * (16 - i) for i, c in enumerate("abcdefghijklmnop")]
    assert all(o.finished and o.metrics.first_token_ts for o in outputs)
    assert len({o.request_id for o in outputs}) == 16


@pytest.mark.parametrize(
    "given",
    ["abc", ids_of("abc"), {"prompt": "abc"}, {"prompt_token_ids": ids_of("abc")}, ["abc"], [ids_of("abc")], ("abc",)],
    ids=lambda g: repr(g)[:30],
)
def test_every_form_of_a_prompt(inside, given):
    (output,) = inside.generate(given, SHORT, use_tqdm=False)
    assert output.outputs[0].text == "abcab" and output.prompt_token_ids == ids_of("abc")


def test_arrays_are_prompts_of_ids(inside):
    one, other = numpy.array(ids_of("ab")), numpy.array(ids_of("c"))
    assert texts(inside.generate(one, SHORT, use_tqdm=False)) == ["ababa"]
    assert texts(inside.generate([one, other], SHORT, use_tqdm=False)) == ["ababa", "ccccc"]
    assert texts(inside.generate([other, other], SHORT, use_tqdm=False)) == ["ccccc", "ccccc"]
    assert texts(inside.generate(numpy.stack([one, one]), SHORT, use_tqdm=False)) == ["ababa", "ababa"]
    inside.llm_engine.add_request("r", one, SHORT)
    inside.llm_engine.abort_request("r")
    with pytest.raises(InputError, match="got bytes"):
        inside.generate(b"ab", SHORT, use_tqdm=False)


@pytest.mark.parametrize("how", ["tuple", "list", "dict", "text"])
def test_ids_are_converted_once_on_their_way_to_the_worker(inside, monkeypatch, how):
    """One tuple from the prompt to a worker's new row: it is the caller's own, or the one made of its list."""
    ids = tuple(ids_of("abcdefgh" * 5))
    given = {"tuple": ids, "list": list(ids), "dict": {"prompt_token_ids": ids}, "text": "abcdefgh" * 5}[how]
    loop = inside.llm_engine.front.client.loop
    made, seen = [], []

    def spy(owner, name, pick, into):
        real = getattr(owner, name)

        def call(*args):
            into.extend(pick(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    spy(inside.llm_engine.front.outputs, "add", lambda prepared: [prepared.token_ids], made)
    spy(loop.scheduler, "add", lambda request: [request.prompt_token_ids], seen)
    spy(loop.executor, "forward", lambda plan: [row.token_ids for row in plan.joined], seen)
    (output,) = inside.generate(given, SHORT, use_tqdm=False)
    (first,) = made
    assert first == ids and len(seen) == 2 and all(form is first for form in seen)
    assert (first is ids) is (how in ("tuple", "dict"))
    assert output.prompt_token_ids == list(ids) and type(output.prompt_token_ids) is list


def test_mixed_prompts_and_the_older_keyword(inside):
    outputs = inside.generate(["ab", {"prompt_token_ids": ids_of("cd")}, ids_of("ef")], SHORT, use_tqdm=False)
    assert texts(outputs) == ["ababa", "cdcdc", "efefe"]
    outputs = inside.generate(prompt_token_ids=[ids_of("xy"), ids_of("z")], sampling_params=SHORT, use_tqdm=False)
    assert texts(outputs) == ["xyxyx", "zzzzz"]
    (output,) = inside.generate("shown", SHORT, prompt_token_ids=[ids_of("xy")], use_tqdm=False)
    assert output.prompt == "shown" and output.outputs[0].text == "xyxyx"
    assert inside.generate([], SHORT, use_tqdm=False) == []


def test_defaults_come_from_the_model(inside):
    assert inside.get_default_sampling_params().max_tokens == 33
    assert len(inside.generate("ab", use_tqdm=False)[0].outputs[0].token_ids) == 33


def test_n_and_prefix_hits(inside):
    (output,) = inside.generate("abcdefgh" * 4, SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert [a.index for a in output.outputs] == [0, 1, 2] and output.finished
    (again,) = inside.generate("abcdefgh" * 4, SHORT, use_tqdm=False)
    assert again.num_cached_tokens == 16
    assert inside.reset_prefix_cache() is True
    (cold,) = inside.generate("abcdefgh" * 4, SHORT, use_tqdm=False)
    assert cold.num_cached_tokens == 0


def test_the_callers_params_are_not_changed(inside):
    params = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA, stop=["q"])
    (output,) = inside.generate("abc", params, use_tqdm=False)
    assert output.outputs[0].text == "abcab" and params.output_kind is RequestOutputKind.DELTA


def test_stop_strings_end_the_engines_work_too(inside):
    outputs = inside.generate(["abcdef", "xyz"], SamplingParams(max_tokens=40, stop="de"), use_tqdm=False)
    assert outputs[0].outputs[0].text == "abc" and outputs[0].outputs[0].stop_reason == "de"
    assert outputs[1].outputs[0].finish_reason == "length"
    inside.generate("a", SHORT, use_tqdm=False)
    assert inside.collective_rpc("num_rows") == [1]  # the row of the last one goes with the next step


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"prompts": ["a", ""]}, ["empty"]),
        ({"prompts": ["a", "b" * 64]}, ["64"]),
        ({"prompts": ["a", 17]}, ["int"]),
        ({"prompts": None}, ["prompts"]),
        ({"prompts": ["a"], "sampling_params": [SHORT, SHORT]}, ["2", "1"]),
        ({"prompts": ["a"], "sampling_params": "greedy"}, ["SamplingParams", "str"]),
        ({"prompts": ["a"], "sampling_params": [None]}, ["SamplingParams", "None"]),
        ({"prompts": ["a"], "priority": [1]}, ["priority", "fcfs"]),
        ({"prompts": ["a"], "priority": [1, 2]}, ["2", "1"]),
        ({"prompts": ["a"], "use_tqdm": 5}, ["use_tqdm", "5"]),
        ({"prompts": ["a"], "lora_request": object()}, ["lora_request"]),
    ],
)
def test_one_bad_prompt_and_none_is_taken(inside, kwargs, words):
    with pytest.raises(InputError) as caught:
        inside.generate(**{"use_tqdm": False, "sampling_params": SHORT} | kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not inside.llm_engine.has_unfinished_requests()
    assert texts(inside.generate("ab", SHORT, use_tqdm=False)) == ["ababa"]


def test_one_failing_request_ends_the_call_and_leaves_nothing(llm):
    bad = SamplingParams(max_tokens=20, extra_args={"fail_at": 3})
    with pytest.raises(EngineGenerateError, match="cannot go on"):
        llm.generate(["ab", "cd", "ef"], [SHORT, bad, SamplingParams(max_tokens=40)], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm.generate("ab", SHORT, use_tqdm=False)) == ["ababa"]


def test_a_dead_engine_says_why_each_time(llm):
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="went wrong"):
            llm.generate(["ab", "cd"], SamplingParams(max_tokens=9, extra_args={"raise_at": 3}), use_tqdm=False)


def test_priority(folder):
    with LLM(folder, max_num_seqs=1, scheduling_policy="priority") as llm:
        done = []
        bar = functools.partial(Bar, done)
        llm.generate(["a", "b", "c"], SHORT, priority=[3, 1, 2], use_tqdm=bar)
        outputs = llm.generate(["a", "b", "c"], SHORT, priority=[3, 1, 2], use_tqdm=False)
        order = sorted(range(3), key=lambda i: outputs[i].metrics.first_token_ts)
        assert order == [1, 2, 0]
    assert done == [("update", 1)] * 3 + ["close"]


class Bar:
    """What tqdm looks like to LLM."""

    def __init__(self, done, *, total, desc, dynamic_ncols, postfix) -> None:
        assert total == 3 and "toks/s" in postfix
        self.done, self.postfix = done, postfix

    def update(self, n) -> None:
        self.done.append(("update", n))

    def close(self) -> None:
        assert "input: 0.00" not in self.postfix
        self.done.append("close")


def test_a_progress_bar_is_shown(inside, capsys):
    inside.generate(["ab", "cd"], SHORT)
    assert "Processed prompts" in capsys.readouterr().err


# ---- chat


TALK = [{"role": "user", "content": "hi"}]


def test_chat(inside):
    (output,) = inside.chat(TALK, SamplingParams(max_tokens=7), use_tqdm=False)
    assert output.prompt == "user:hi;assistant:" and output.outputs[0].text == "user:hi"
    outputs = inside.chat([TALK, [*TALK, {"role": "assistant", "content": "yo"}]], SHORT, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["user:hi;assistant:", "user:hi;assistant:yo;assistant:"]
    (output,) = inside.chat(TALK, SHORT, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "user:hi;"
    (output,) = inside.chat(
        TALK, SHORT, use_tqdm=False, chat_template="{{ tools | length }}{{ colour }}", tools=[{"type": "function"}],
        chat_template_kwargs={"colour": "red"},
    )  # fmt: skip
    assert output.prompt == "1red"


def test_chat_goes_on_with_the_last_message(inside):
    talk = [*TALK, {"role": "assistant", "content": "well"}]
    (output,) = inside.chat(talk, SHORT, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "user:hi;assistant:well"
    with pytest.raises(InputError, match="cannot both"):
        inside.chat(talk, SHORT, continue_final_message=True)


def test_preprocess_chat_gives_prompts_for_generate(inside):
    (prompt,) = inside.preprocess_chat(TALK)
    assert prompt == {"prompt": "user:hi;assistant:", "prompt_token_ids": ids_of("user:hi;assistant:")}
    assert texts(inside.generate(prompt, SHORT, use_tqdm=False)) == ["user:"]


@pytest.mark.parametrize("messages", ["hi", [], ["hi"], [["hi"]], None])
def test_bad_messages(inside, messages):
    with pytest.raises(InputError, match="messages"):
        inside.chat(messages, SHORT)


# ---- the rest


def test_attributes_the_documentation_names(inside):
    engine = inside.llm_engine
    assert engine.vllm_config.parallel_config.data_parallel_rank == 0
    assert engine.vllm_config.model_config is inside.model_config
    assert engine.model_executor.driver_worker.worker.model_runner.model.name == "repeats its prompt"
    assert inside.apply_model(lambda model: model.name) == ["repeats its prompt"]
    assert inside.collective_rpc(lambda worker, n: worker.num_rows() + n, args=(2,)) == [2]
    assert engine.engine_core.reset_prefix_cache() is True
    with pytest.raises(NotBuiltError):
        engine.engine_core.sleep()
    with pytest.raises(AttributeError, match="no verb"):
        engine.engine_core.no_such_thing  # noqa: B018
    assert inside.default_sampling_params["max_tokens"] == 33
    assert inside.get_tokenizer().encode("ab") == ids_of("ab")
    assert inside.engine_class is LLMEngine


def test_functions_cross_by_import_path(folder, monkeypatch):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "1")
    env.forget_all()
    with LLM(folder) as llm:
        assert llm.apply_model(name_of_model) == ["repeats its prompt"]
        with pytest.raises(InputError, match="in this process"):
            llm.apply_model(lambda model: 1)
        with pytest.raises(InputError, match="apply_model"):
            llm.llm_engine.model_executor  # noqa: B018


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "reward"])
def test_pooling_a_generator_is_refused(inside, method):
    with pytest.raises(InputError, match="runner=generate, and cannot be pooled"):
        getattr(inside, method)(["a"], *(["b"] if method == "score" else []))


def test_sleep_is_refused(inside):
    for name in ("sleep", "wake_up"):
        with pytest.raises(NotBuiltError):
            getattr(inside, name)()


def test_metrics_need_statistics(folder):
    with LLM(folder) as quiet, pytest.raises(ConfigError, match="disable_log_stats"):
        quiet.get_metrics()
    with LLM(folder, disable_log_stats=False) as llm:
        llm.generate(["ab", "cd"], SHORT, use_tqdm=False)
        found = {m.name: m for m in llm.get_metrics()}
        assert found["vllm:generation_tokens"].value == 10
        assert found["vllm:prompt_tokens"].value == 4
        assert found["vllm:request_success"]
        labels, cache = found["vllm:cache_config_info"].labels, llm.llm_engine.vllm_config.cache_config
        assert labels["num_gpu_blocks"] == str(cache.num_gpu_blocks) and labels["num_gpu_blocks"].isdigit()


def test_what_the_kv_cache_has_room_for_stands_in_the_config(folder):
    assert EngineArgs(model=folder).create_engine_config().cache_config.num_gpu_blocks is None
    with LLM(folder, max_model_len=64, num_gpu_blocks_override=12, block_size=16) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        assert (cache.num_gpu_blocks, cache.kv_cache_max_concurrency, cache.kv_cache_size_tokens) == (12, 3.0, 192)
        assert llm.llm_engine.cache_config is cache


def test_engine_args_make_the_same_engine(folder):
    args = EngineArgs(model=folder, max_model_len=32)
    with LLM(**dataclasses.asdict(args) | {"seed": 3}) as llm:
        assert llm.model_config.max_model_len == 32 and llm.model_config.seed == 3


def test_deleting_frees_the_worker(folder):
    llm = LLM(folder)
    llm.generate("ab", SHORT, use_tqdm=False)
    executor = llm.llm_engine.model_executor
    worker = weakref.ref(executor.worker)
    gc.disable()
    try:
        del llm
        assert executor.is_shut_down
        del executor
        assert worker() is None  # by counting references alone
    finally:
        gc.enable()


def test_a_closed_llm_says_so(folder):
    llm = LLM(folder)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("ab", SHORT)


# ---- LLMEngine


def test_steps_by_hand(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder, max_num_seqs=4))
    assert engine.step() == [] and not engine.has_unfinished_requests()
    engine.add_request("0", "abc", SamplingParams(n=2, max_tokens=6, logprobs=1, prompt_logprobs=1))
    final, step = {}, 0
    while engine.has_unfinished_requests():
        step += 1
        if step == 2:
            engine.add_request("1", "xy", SamplingParams(max_tokens=3))
            assert engine.get_num_unfinished_requests() == 2
        if step == 3:
            assert engine.reset_prefix_cache(reset_running_requests=True) is True
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output
    assert [a.text for a in final["0"].outputs] == ["abcabc", "abcabc"]
    assert len(final["0"].prompt_logprobs) == 3 and len(final["0"].outputs[1].logprobs) == 6
    assert texts([final["1"]]) == ["xyx"]
    engine.add_request("2", "q", SamplingParams(max_tokens=60))
    with pytest.raises(InputError, match="'2'"):
        engine.add_request("2", "q", SamplingParams())
    engine.abort_request(["2", "unknown"])
    assert not engine.has_unfinished_requests()
    engine.close()


def ended(engine) -> dict[str, str]:
    """Turn it until nothing is left to say."""
    found = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0].text for o in engine.step() if o.finished}
    return found


@pytest.mark.parametrize("process", ["0", "1"], ids=["in process", "own process"])
def test_an_id_may_be_used_again_at_once(folder, monkeypatch, process):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", process)
    env.forget_all()
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder))
    engine.add_request("0", "abc", SamplingParams(max_tokens=50))
    engine.step()
    engine.abort_request("0")
    engine.add_request("0", "xyz", SHORT)
    assert ended(engine) == {"0": "xyzxy"}
    engine.add_request("0", "abc", SamplingParams(max_tokens=50, stop="c"))
    assert ended(engine) == {"0": "ab"}
    engine.add_request("0", "xyz", SHORT)
    assert ended(engine) == {"0": "xyzxy"}
    engine.close()


def test_a_failure_hides_no_result_and_no_other_failure(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder))
    failing = SamplingParams(max_tokens=9, extra_args={"fail_at": 2})
    engine.add_request("good", "ab", SamplingParams(max_tokens=2))
    engine.add_request("bad", "ab", failing)
    engine.add_request("worse", "ab", failing)
    engine.step()
    for _ in range(2):
        assert engine.has_unfinished_requests()
        with pytest.raises(EngineGenerateError):
            engine.step()
    assert ended(engine) == {"good": "ab"} and engine.step() == []
    engine.close()


def test_an_interrupt_while_prompts_go_in_leaves_nothing_behind(inside, monkeypatch):
    loop = inside.llm_engine.front.client.loop
    submit, came = loop.submit, []

    def interrupted(request):
        came.append(request)
        if len(came) == 3:
            raise KeyboardInterrupt
        submit(request)

    monkeypatch.setattr(loop, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inside.generate(["ab"] * 5, SHORT, use_tqdm=False)
    assert not loop.scheduler.has_unfinished() and inside.llm_engine.get_num_unfinished_requests() == 0


def test_a_bar_that_cannot_be_built_leaves_nothing_behind(inside):
    def build(**kwargs):
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal"):
        inside.generate("ab", SHORT, use_tqdm=build)
    assert inside.llm_engine.get_num_unfinished_requests() == 0
    assert not inside.llm_engine.front.client.loop.scheduler.has_unfinished()


def test_an_interrupt_during_a_verb_leaves_the_step_whole(folder):
    with LLM(folder, async_scheduling=True) as llm:
        engine, loop = llm.llm_engine, llm.llm_engine.front.client.loop
        engine.add_request("r", "ab", SHORT)
        engine.step()
        plan, pending = loop._flying.pop()

        class Interrupted:
            def result(self):
                signal.raise_signal(signal.SIGINT)
                return pending.result()

        loop._flying.append((plan, Interrupted()))
        with pytest.raises(KeyboardInterrupt):
            llm.reset_prefix_cache()
        assert ended(engine) == {"r": "ababa"}


def test_an_error_names_the_prompt_that_it_is_about(llm):
    prompts = ["ab"] * 300
    prompts[277] = "x" * 200
    with pytest.raises(InputError, match=r"^prompts\[277\]: The request is longer than the maximum"):
        llm.generate(prompts, SHORT, use_tqdm=False)
    with pytest.raises(InputError, match=r"^The request is longer than the maximum"):
        llm.generate(prompts[277], SHORT, use_tqdm=False)
    with pytest.raises(InputError, match=r"^prompts\[1\]: a prompt is a string"):
        llm.generate(["ab", None], SHORT, use_tqdm=False)
    fails = SamplingParams(max_tokens=5, extra_args={"fail_at": 2})
    with pytest.raises(EngineGenerateError, match=r"^prompts\[2\]: .*this one cannot go on"):
        llm.generate(["ab"] * 4, [SHORT, SHORT, fails, SHORT], use_tqdm=False)
    assert texts(llm.generate(["ab", "c"], SHORT, use_tqdm=False)) == ["ababa", "ccccc"]


def test_an_error_names_the_parameters_that_it_is_about(inside):
    wrong = SamplingParams(max_tokens=5, logprobs=500)
    with pytest.raises(InputError, match=r"^sampling_params\[1\]: logprobs is 500"):
        inside.generate(["ab"] * 4, [SHORT, wrong, SHORT, wrong], use_tqdm=False)
    for several in (wrong, [wrong] * 4):
        with pytest.raises(InputError, match=r"^logprobs is 500"):
            inside.generate(["ab"] * 4, several, use_tqdm=False)


def test_an_error_names_the_conversation_that_it_is_about(inside):
    right, wrong = [{"role": "user", "content": "ab"}], [{"content": "ab"}]
    with pytest.raises(InputError, match=r"^messages\[1\]: "):
        inside.chat([right, wrong], SHORT, use_tqdm=False)
    with pytest.raises(InputError, match=r"^(?!messages\[0\]: )"):
        inside.chat([wrong], SHORT, use_tqdm=False)


def test_threads_take_turns_and_get_the_answers_of_serial_calls(llm):
    prompts = [["ab", "cde"], ["xy"], ["pqr", "st", "uvw"], ["k"]] * 2
    params = SamplingParams(max_tokens=20)
    alone = [texts(llm.generate(one, params, use_tqdm=False)) for one in prompts]

    def ask(one):
        with pytest.raises(InputError):
            llm.generate(one, SamplingParams(max_tokens=0), use_tqdm=False)
        answers = texts(llm.generate(one, params, use_tqdm=False))
        llm.collective_rpc("tests.fake_engine:double", args=(1,))
        llm.reset_prefix_cache()
        return answers

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts, timeout=60)) == alone


def test_a_verb_comes_between_the_steps_of_another_threads_call(llm):
    llm.call("pause")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llm.generate, "ab", SHORT, use_tqdm=False)
        while not llm.llm_engine.get_num_unfinished_requests():
            pass
        llm.call("resume")
        assert texts(answer.result(60)) == ["ababa"]


def test_one_thread_may_add_requests_while_another_steps(inside, monkeypatch):
    engine, names = inside.llm_engine, [str(number) for number in range(40)]
    loop, in_step, cut = engine.front.client.loop, threading.Event(), []
    step, submit = loop.step, loop.submit

    def slow_step():
        in_step.set()
        time.sleep(0.001)  # another thread runs
        outputs = step()
        in_step.clear()
        return outputs

    monkeypatch.setattr(loop, "step", slow_step)
    monkeypatch.setattr(loop, "submit", lambda request: (cut.append(in_step.is_set()), submit(request)))
    adding = threading.Thread(target=lambda: [engine.add_request(name, "ab", SHORT) for name in names])
    adding.start()
    found: dict[str, str] = {}
    while len(found) < len(names):
        found |= {one.request_id: one.outputs[0].text for one in engine.step() if one.finished}
    adding.join()
    assert found == dict.fromkeys(names, "ababa") and cut == [False] * len(names)


def test_a_request_may_be_aborted_by_one_thread_while_another_reads_its_end(llm, monkeypatch):
    engine = llm.llm_engine
    take, aborts = engine.front.take, list[threading.Thread]()

    def slow_take(news):
        if any(one.finish_reason is not None for one in news.outputs):
            aborts.append(threading.Thread(target=engine.abort_request, args=("r",)))
            aborts[-1].start()
        return take(news)

    process = engine.front.outputs.process

    def outputs_and_a_pause(outputs):
        yield from outputs
        for one in aborts:
            one.join(0.2)  # without the lock it gets in between

    monkeypatch.setattr(engine.front, "take", slow_take)
    monkeypatch.setattr(engine.front.outputs, "process", lambda outputs: process(outputs_and_a_pause(outputs)))
    engine.add_request("r", "ab", SHORT)
    found = [one for one in iter_steps(engine) if one.finished]
    for one in aborts:
        one.join()
    assert len(aborts) == 1 and texts(found) == ["ababa"]


def iter_steps(engine):
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_an_engine_that_two_threads_close_at_once_is_closed_once(folder):
    config = EngineArgs(model=folder, max_model_len=64).create_engine_config()

    class Racing(InProcessClient):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "dead" and value is not None and not hasattr(self, "other"):
                self.other = threading.Thread(target=self.close)
                self.other.start()
                self.other.join(0.2)  # without the lock it gets in between

    client = Racing(config)
    client.wait_ready()
    closed = []
    shutdown = client.loop.executor.shutdown
    client.loop.executor.shutdown = lambda: (closed.append(1), shutdown())
    client.close()
    client.other.join()
    assert closed == [1]


@pytest.mark.parametrize("verb", ["submit", "abort"])
def test_what_comes_to_an_engine_that_closes_meanwhile_is_refused(folder, verb):
    """It waits for its turn behind whoever closes the engine."""
    client = InProcessClient(EngineArgs(model=folder, max_model_len=64).create_engine_config())
    client.wait_ready()
    loop, told = client.loop, []
    loop.submit = loop.abort = told.append
    failures = []

    def late():
        try:
            getattr(client, verb)(["r"])
        except EngineDeadError as dead:
            failures.append(dead.reason)

    def close_when_it_waits():
        other.start()
        while client._turns._next.acquire(blocking=False):
            client._turns._next.release()
            time.sleep(0.001)
        client.close()

    other = threading.Thread(target=late)
    client._turns.take(close_when_it_waits)
    other.join()
    assert failures == [CLOSED] and not told


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR2, signal.SIGINT])
def test_a_signals_handler_that_raises_ends_the_call_and_not_the_engine(inside, monkeypatch, number):
    loop = inside.llm_engine.front.client.loop
    plan = loop.scheduler.plan
    monkeypatch.setattr(loop.scheduler, "plan", lambda: (plan(), signal.raise_signal(number))[0])

    def handle(number, frame):
        raise TimeoutError("deadline")

    before = signal.signal(number, handle)
    try:
        with pytest.raises(TimeoutError, match="deadline"):
            inside.generate(["ab"] * 3, SHORT, use_tqdm=False)
    finally:
        signal.signal(number, before)
    monkeypatch.undo()
    assert not loop.scheduler.has_unfinished() and inside.llm_engine.get_num_unfinished_requests() == 0
    assert texts(inside.generate("ab", SHORT, use_tqdm=False)) == ["ababa"]
