"""Registry, environment and clock: the ground floor."""

import pytest

from quire.base import env
from quire.base.clock import Throttle
from quire.base.registry import Registry, load, path_of


def test_load_and_path_are_inverse():
    assert load(path_of(Throttle)) is Throttle
    assert load("quire.base.clock.Throttle") is Throttle
    for wrong in ("nothing", "quire.base.clock:Nothing", "no.such.module:X", ""):
        with pytest.raises(ImportError):
            load(wrong)


def test_what_another_process_cannot_import_is_refused():
    def local():
        pass

    for thing in (local, lambda: None):
        with pytest.raises(ImportError, match="cannot import"):
            path_of(thing)


def test_registry_loads_on_use_and_suggests():
    registry = Registry("clock", {"throttle": "quire.base.clock:Throttle", "broken": "quire.base.nothing:X"})
    assert registry.get("throttle") is Throttle and registry.get("throttle") is Throttle
    registry.register("own", 5)
    assert registry.get("own") == 5 and "own" in registry and set(registry) == {"throttle", "broken", "own"}
    with pytest.raises(LookupError, match="did you mean 'throttle'"):
        registry.get("throtle")
    with pytest.raises(LookupError, match=r"^unknown clock 'x'\. Known: broken, own, throttle$"):
        registry.get("x")
    with pytest.raises(ImportError):
        registry.get("broken")


def test_environment_is_read_once_with_both_spellings(monkeypatch):
    variable = env.LOGGING_LEVEL
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    variable.forget()
    assert variable.get() == "DEBUG"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "ERROR")
    assert variable.get() == "DEBUG", "the first reading is kept"
    variable.forget()
    assert variable.get() == "ERROR", "Quire's own spelling wins"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "LOUD")
    variable.forget()
    with pytest.raises(ValueError, match="QUIRE_LOGGING_LEVEL='LOUD': choose one of"):
        variable.get()
    monkeypatch.undo()
    variable.forget()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("QUIRE_CPU_KVCACHE_SPACE", "abc", "write a number of GiB, 0 or more"),
        ("QUIRE_CPU_KVCACHE_SPACE", "nan", "write a number of GiB, 0 or more"),
        ("OMP_NUM_THREADS", "abc", "write a whole number"),
        ("QUIRE_DP_RANK", "1.5", "write a whole number"),
        ("QUIRE_ENGINE_START_TIMEOUT_S", "-3", "write a whole number above 0"),
        ("QUIRE_PORT", "http", "write a port number"),
    ],
)
def test_a_variable_that_is_no_number_says_what_to_write(monkeypatch, name, value, wanted):
    monkeypatch.setenv(name, value)
    variable = env.ALL[name.removeprefix("QUIRE_")]
    variable.forget()
    with pytest.raises(env.VariableError, match=rf"environment variable {name}='{value}': {wanted}$"):
        variable.get()
    monkeypatch.undo()
    variable.forget()


def test_a_port_that_is_a_uri_gets_a_hint(monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    env.PORT.forget()
    with pytest.raises(ValueError, match="Kubernetes"):
        env.PORT.get()
    monkeypatch.undo()
    env.PORT.forget()


def test_every_variable_is_documented():
    assert env.ALL and all(variable.doc.endswith(".") for variable in env.ALL.values())


def test_throttle():
    throttle = Throttle(3600)
    assert throttle.ready() and not throttle.ready()
