"""Adapters over HTTP: `model` picks one in every dialect; loading, unloading and resolving while the server runs."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from quire.base import env, plugins
from quire.schema.errors import ConfigError, InputError
from quire.server import adapters, resolvers
from quire.server.adapters import LoraModule, read_modules
from quire.server.host import ENGINE_DIED, Host
from quire.server.resolvers import FilesystemResolver
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_llava import TinyLlava
from tests.server.live import Live, error_of, live
from tests.tiny_adapters import TinyAdapter, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny, tiny_model

PROMPT = [5, 9, 77, 100, 41, 8]
BODY = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Served:
    def __init__(self, server: Live, model: Any, folder: Path, adapters: dict[str, TinyAdapter]) -> None:
        self.server, self.model, self.folder, self.adapters = server, model, folder, adapters

    def tokens(self, name: str) -> list[int]:
        response = self.server.post("/v1/completions", BODY | {"model": name})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def expected(self, adapter: TinyAdapter | None) -> list[int]:
        return greedy(self.model if adapter is None else merge(self.model, adapter), PROMPT, 5)

    def names(self) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.server.url}/v1/models", timeout=60).json()["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny("LlamaForCausalLM", folder / "model")
    adapters = {
        name: write_adapter(model, folder / name, seed=seed) for seed, name in enumerate(("one", "two", "late"))
    }
    engine = {
        "served_model_name": "base", "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
        "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        patch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(folder / "resolved"))
        write_adapter(model, folder / "resolved" / "found", seed=9)
        with live(str(folder / "model"), engine=engine) as server:
            modules = [
                f"one={adapters['one'].path}",
                f'{{"name": "two", "path": "{adapters["two"].path}", "base_model_name": "base"}}',
            ]
            loading = server.state.adapters.load_modules(read_modules(modules))
            asyncio.run_coroutine_threadsafe(loading, server.loop).result(60)
            yield Served(server, model, folder, adapters)
    env.forget_all()


def test_a_name_picks_its_adapter(served: Served) -> None:
    answers = {name: served.tokens(name) for name in ("base", "one", "two")}
    assert answers["base"] == served.expected(None)
    assert answers["one"] == served.expected(served.adapters["one"])
    assert answers["two"] == served.expected(served.adapters["two"])
    assert len({tuple(answer) for answer in answers.values()}) == 3


def test_lineage(served: Served) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{served.server.url}/v1/models", timeout=60).json()["data"]}
    assert cards["base"]["parent"] is None
    for name in ("one", "two"):
        assert cards[name]["parent"] == "base" and cards[name]["root"] == served.adapters[name].path
    card = httpx.get(f"{served.server.url}/v1/models/one", timeout=60).json()
    assert card["id"] == "one" and card["max_model_len"] == 128


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the river"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "the river"}]}),
        ("/v1/responses", {"input": "the river"}),
    ],
)
def test_every_dialect(served: Served, path: str, body: dict[str, Any]) -> None:
    length = {"max_output_tokens": 6} if path == "/v1/responses" else {"max_tokens": 6}
    texts = set()
    for name in ("base", "one", "two"):
        response = served.server.post(path, body | length | {"model": name, "temperature": 0})
        assert response.status_code == 200 and response.json()["model"] == name
        texts.add(str({key: response.json().get(key) for key in ("choices", "content", "output")}.values()))
    assert len(texts) == 3


def test_the_openai_client(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", timeout=60)
    assert {"base", "one", "two"} <= {model.id for model in client.models.list()}
    texts = [
        client.completions.create(model=name, prompt=PROMPT, max_tokens=5, temperature=0).choices[0].text
        for name in ("base", "one", "two")
    ]
    assert len(set(texts)) == 3


def test_loading_replacing_and_unloading(served: Served) -> None:
    server, late = served.server, served.adapters["late"]
    assert server.post("/v1/completions", BODY | {"model": "late"}).status_code == 404
    request = {"lora_name": "late", "lora_path": late.path}
    response = server.post("/v1/load_lora_adapter", request)
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'late' added successfully."
    assert served.tokens("late") == served.expected(late) and "late" in served.names()
    assert "already been loaded" in error_of(server.post("/v1/load_lora_adapter", request))["message"]
    assert (
        "already been loaded"
        in error_of(server.post("/v1/load_lora_adapter", request | {"lora_name": "base"}))["message"]
    )
    changed = write_adapter(served.model, served.folder / "late", seed=77)
    response = server.post("/v1/load_lora_adapter", request | {"load_inplace": True})
    assert response.status_code == 200 and served.tokens("late") == served.expected(changed) != served.expected(late)
    response = server.post("/v1/unload_lora_adapter", {"lora_name": "late"})
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'late' removed successfully."
    assert "late" not in served.names()
    error_of(server.post("/v1/completions", BODY | {"model": "late"}), 404)
    error_of(server.post("/v1/unload_lora_adapter", {"lora_name": "late"}), 404)
    error_of(server.post("/v1/unload_lora_adapter", {"lora_name": "base"}), 404)


def test_what_cannot_be_loaded_changes_nothing(served: Served) -> None:
    server = served.server
    before = served.names()
    for body, words in (
        ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, "not a folder"),
        ({"lora_name": "x", "lora_path": str(served.folder / "model")}, "adapter_config.json"),
        ({"lora_name": "x\n", "lora_path": served.adapters["one"].path}, "printable"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_path": "x"}, "lora_name"),
    ):
        assert words in error_of(server.post("/v1/load_lora_adapter", body))["message"]
    other = tiny_model("LlamaForCausalLM", hidden_size=32, head_dim=8)
    for name, config, model, words in (
        ("dora", {"use_dora": True}, served.model, "DoRA"),
        ("saved", {"modules_to_save": ["lm_head"]}, served.model, "modules_to_save"),
        ("other", {}, other, "another model"),
        ("unknown", {}, tiny_model("GPTNeoXForCausalLM"), "the model has no layers"),
        ("targets", {"target_modules": [1]}, served.model, "target_modules"),
    ):
        path = write_adapter(model, served.folder / name, config=config).path
        body = {"lora_name": "x", "lora_path": path}
        assert words in error_of(server.post("/v1/load_lora_adapter", body))["message"], name
    large = write_adapter(served.model, served.folder / "large", rank=16)
    body = {"lora_name": "one", "lora_path": large.path, "load_inplace": True}
    assert "max_lora_rank" in error_of(server.post("/v1/load_lora_adapter", body))["message"]
    assert served.names() == before and served.tokens("one") == served.expected(served.adapters["one"])


def test_the_number_of_adapters_is_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    num_adapters = sum(model.adapter is not None for _, model in served.server.state.served.entries())
    monkeypatch.setattr(adapters, "MOST_ADAPTERS", num_adapters)
    body = {"lora_name": "one more", "lora_path": served.adapters["late"].path}
    message = error_of(served.server.post("/v1/load_lora_adapter", body))["message"]
    assert f"a server has {num_adapters} at most: unload one first" in message and "one more" not in served.names()
    body = {"lora_name": "one", "lora_path": served.adapters["one"].path, "load_inplace": True}
    assert served.server.post("/v1/load_lora_adapter", body).status_code == 200, "one may be replaced"


def test_a_resolver_finds_what_lies_in_its_folder(served: Served) -> None:
    assert "found" not in served.names()
    expected = served.expected(write_adapter(served.model, served.folder / "resolved" / "found", seed=9))
    assert served.tokens("found") == expected and "found" in served.names()
    for name in ("../one", "/etc", "..", "gone"):
        error_of(served.server.post("/v1/completions", BODY | {"model": name}), 404)


def test_a_resolver_of_a_plug_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by whoever's entry point, under the names that vLLM documents; asked before Quire's own."""
    adapter = write_adapter(served.model, served.folder / "theirs", seed=31)
    asked: list[tuple[str, str]] = []

    def register() -> None:
        from vllm.lora.request import LoRARequest
        from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

        class Theirs(LoRAResolver):
            async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
                asked.append((base_model_name, lora_name))
                return LoRARequest(lora_name, 4711, adapter.path) if lora_name == "theirs" else None

        LoRAResolverRegistry.register_resolver("theirs", Theirs())

    entry = SimpleNamespace(name="theirs", value="theirs:register", dist=None, load=lambda: register)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "vllm.general_plugins" else [])
    monkeypatch.setattr(plugins, "_called", set())
    monkeypatch.setattr(resolvers.LoRAResolverRegistry, "_resolvers", {})
    plugins.call_plugins()
    assert served.tokens("theirs") == served.expected(adapter) and "theirs" in served.names()
    error_of(served.server.post("/v1/completions", BODY | {"model": "nobody's"}), 404)
    assert [name for _, name in asked] == ["theirs", "nobody's"]  # once it is loaded, nobody is asked again
    assert served.tokens("theirs") == served.expected(adapter) and len(asked) == 2


def test_a_resolver_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    (tmp_path / "in").mkdir()
    resolver = FilesystemResolver(str(tmp_path / "in"))
    for name in ("../out", "..", ".", "", str(tmp_path / "out"), "a\0b", "x" * 300):
        assert asyncio.run(resolver.resolve_lora("base", name)) is None
    assert asyncio.run(FilesystemResolver(str(tmp_path)).resolve_lora("base", "out")) is not None


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["a=/x", "b=/y=z"], [LoraModule("a", "/x"), LoraModule("b", "/y=z")]),
        (['{"name": "a", "path": "/x", "base_model_name": "m"}'], [LoraModule("a", "/x", "m")]),
        (
            ['[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]'],
            [LoraModule("a", "/x"), LoraModule("b", "/y")],
        ),
    ],
)
def test_lora_modules(entries: list[str], expected: list[LoraModule]) -> None:
    assert read_modules(entries) == expected


@pytest.mark.parametrize(
    "entry",
    ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": 1, "path": "x"}', '["a"]', '{"name": "a", "path": "x", "z": 1}'],
)
def test_lora_modules_that_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        read_modules([entry])


def test_media_bring_their_adapter(tmp_path: Path) -> None:
    """default_mm_loras in chats: an image brings its adapter, text does not, and `model` may name it."""
    tiny = TinyLlava(tmp_path)
    found = linear_modules(tiny.model, ("q_proj", "v_proj", "down_proj"))
    modules = {name: size for name, size in found.items() if "language_model" in name}
    adapter = write_adapter(tiny.model, tmp_path / "adapter", modules=modules, strength=1.0)
    image, text = picture(64, 48), {"type": "text", "text": "What"}
    coded = io.BytesIO()
    image.save(coded, "PNG")
    url = "data:image/png;base64," + base64.b64encode(coded.getvalue()).decode()
    chats = {
        "image": [{"type": "image_url", "image_url": {"url": url}}, text],
        "text": [text],
    }
    words = {"image": ("user: <image>\nWhat\nassistant:", [image]), "text": ("user: What\nassistant:", [])}
    expected = {(kind, None): tiny.answer(*given)[1] for kind, given in words.items()}
    tiny.model = merge(tiny.model, adapter)
    expected |= {(kind, "image"): tiny.answer(*given)[1] for kind, given in words.items()}
    assert expected["image", None] != expected["image", "image"]
    engine = {"dtype": "float32", "max_model_len": 256, "served_model_name": "base", "enable_lora": True,
              "default_mm_loras": {"image": adapter.path}}  # fmt: skip
    with live(str(tmp_path), engine=engine) as server:
        loading = server.state.adapters.load_media_adapters()
        asyncio.run_coroutine_threadsafe(loading, server.loop).result(60)
        for model, kind, own in (
            ("base", "image", "image"), ("base", "text", None), ("image", "image", "image"), ("image", "text", "image"),
        ):  # fmt: skip
            body = {
                "model": model, "messages": [{"role": "user", "content": chats[kind]}], "temperature": 0,
                "max_tokens": 8, "ignore_eos": True, "return_token_ids": True,
                "logit_bias": {str(tiny.image_id): -100},
            }  # fmt: skip
            response = server.post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == expected[kind, own], (model, kind)
        names = [card["id"] for card in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]]
        assert names == ["base", "image"]
        for changing in (
            server.state.adapters.unload("image"),
            server.state.adapters.load("image", str(tmp_path), load_inplace=True),
        ):
            with pytest.raises(
                InputError, match="'image' is one of default_mm_loras: it cannot be replaced or unloaded"
            ):
                asyncio.run_coroutine_threadsafe(changing, server.loop).result(60)


@pytest.mark.parametrize("which", ["load_modules", "load_media_adapters"])
def test_a_server_ends_if_an_adapter_of_its_options_cannot_be_loaded(which: str) -> None:
    async def load(*given: object) -> None:
        return None

    async def fail(*given: object) -> None:
        raise ConfigError(f"{which}: no such folder")

    made = SimpleNamespace(**{"load_modules": load, "load_media_adapters": load, which: fail})
    host = Host.__new__(Host)
    host.state = cast(Any, SimpleNamespace(adapters=made, options=SimpleNamespace(lora_modules=())))
    host.status = 0
    assert not asyncio.run(host._load_adapters())
    assert host.status == ENGINE_DIED
