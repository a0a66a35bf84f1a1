"""The console in a browser: conversations, the engine at work, keys, themes, widths, hostile text.

The model repeats its prompt, so whatever a test wants the model to say, it says to the model.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import fake_engine
from tests.server.chromium import Browser, Page, browser, needs_chromium
from tests.server.live import Live, live_fake

pytestmark = needs_chromium
ENDED = "!document.body.classList.contains('busy')"
ANSWERS = "document.querySelectorAll('.message.assistant').length"


class Pace:
    """Seconds that a step of the fake worker takes."""

    seconds = 0.0


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    forward = fake_engine.FakeExecutor.forward

    def slow(self: Any, plan: Any) -> None:
        time.sleep(Pace.seconds)
        forward(self, plan)

    engine = {"disable_log_stats": False, "generation_config": "vllm"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine.FakeExecutor, "forward", slow)
        with live_fake(tmp_path_factory.mktemp("console"), engine=engine) as opened:
            yield opened


@pytest.fixture
def page(chromium: Browser, server: Live) -> Iterator[Page]:
    Pace.seconds = 0.0
    opened = chromium.page(server.url + "/")
    opened.until("document.body.dataset.state === 'live'")
    yield opened
    strangers = {r["url"] for r in opened.requests()} - {r["url"] for r in opened.requests() if local(r["url"], server)}
    refused = "Failed to load resource: the server responded with a status of 4"  # what some tests are about
    complaints = [words for words in opened.complaints() if not words.startswith(refused)]
    opened.close()
    assert not strangers, "a request left the machine"
    assert not complaints


def local(url: str, server: Live) -> bool:
    return url.startswith(server.url + "/")


def say(page: Page, text: str, *, wait: bool = True) -> None:
    count = page.run(ANSWERS)
    page.run("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter")
    page.until(f"{ANSWERS} === {count + 1}")
    if wait:
        page.until(ENDED)


def limit_tokens(page: Page, number: int) -> None:
    page.run(
        f"(() => {{ const f = document.getElementById('max_tokens'); f.value = {number}; "
        "f.dispatchEvent(new Event('input')); })()"
    )


def answer(page: Page) -> str:
    return str(page.run("[...document.querySelectorAll('.message.assistant .body')].at(-1).textContent"))


# ---- the conversation ----------------------------------------------------------------------------------------------


def test_an_answer_streams_and_says_how_fast_it_came(page: Page) -> None:
    Pace.seconds = 0.02
    limit_tokens(page, 60)
    say(page, "hello there", wait=False)
    early = page.until("document.querySelector('.assistant .body').textContent.length > 3 && "
                       "document.querySelector('.assistant .body').textContent")  # fmt: skip
    assert page.run("document.body.classList.contains('busy')"), "it came in one piece"
    page.until(ENDED)
    whole = answer(page)
    assert len(early) < len(whole) and "user:hello there;" in whole
    timing = page.run("document.querySelector('.assistant .timing').textContent")
    assert "60 tokens" in timing and "tok/s" in timing and "first after" in timing
    asked = [r for r in page.requests() if r["url"].endswith("/v1/chat/completions")]
    body = json.loads(asked[-1]["postData"])
    assert body["messages"] == [{"role": "user", "content": "hello there"}] and body["stream"] is True


def test_what_was_said_goes_along_with_the_next_question(page: Page) -> None:
    limit_tokens(page, 4)
    say(page, "one")
    first = answer(page)
    say(page, "two")
    body = json.loads([r for r in page.requests() if r["url"].endswith("/v1/chat/completions")][-1]["postData"])
    assert [m["content"] for m in body["messages"]] == ["one", first, "two"]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_can_be_stopped(page: Page, server: Live, how: str) -> None:
    Pace.seconds = 0.05
    say(page, "go on and on", wait=False)
    page.until("document.querySelector('.assistant .body').textContent.length > 2")
    page.click("#stop") if how == "button" else page.press("Escape")
    page.until(ENDED)
    kept = answer(page)
    assert 0 < len(kept) < 300
    assert "stopped" in page.run("document.querySelector('.assistant .timing').textContent")
    Pace.seconds = 0.0
    end = time.monotonic() + 30
    while server.engine.front.metrics.totals().running and time.monotonic() < end:  # type: ignore[union-attr]
        time.sleep(0.05)
    assert server.engine.front.metrics.totals().running == 0  # type: ignore[union-attr]
    limit_tokens(page, 4)
    say(page, "still there?")
    assert page.run(ANSWERS) == 2 and len(answer(page)) > 0


def test_a_reload_keeps_the_conversation(page: Page) -> None:
    limit_tokens(page, 20)
    say(page, "remember me")
    before = page.run("document.getElementById('messages').innerText")
    page.reload()
    page.until("document.body.dataset.state === 'live'")
    assert page.run("document.getElementById('messages').innerText") == before
    assert "remember me" in before and page.run("document.getElementById('max_tokens').value") == "20"
    page.click("#new-button")
    page.until("document.querySelectorAll('.message').length === 0")
    page.reload()
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert page.run("getComputedStyle(document.getElementById('empty')).display") != "none"


def test_a_reload_in_the_middle_keeps_what_had_come(page: Page) -> None:
    Pace.seconds = 0.05
    say(page, "a long answer", wait=False)
    page.until("document.querySelector('.assistant .body').textContent.length > 4")
    page.reload()
    page.until("document.body.dataset.state === 'live'")
    Pace.seconds = 0.0
    assert len(answer(page)) > 2 and "stopped" in page.run("document.querySelector('.assistant .timing').textContent")


def test_a_refusal_is_shown_and_can_be_tried_again(page: Page) -> None:
    limit_tokens(page, 4)
    say(page, "x" * 600)  # more than the model's 512
    error = page.until("document.querySelector('.assistant .error')?.textContent")
    assert "512" in error
    page.click(".assistant.last .again")
    page.until(ENDED)
    assert page.run(ANSWERS) == 1


def test_storage_may_hold_anything(page: Page) -> None:
    page.run("localStorage.setItem('quire.chat', JSON.stringify([null, 3, {role: 'root', content: 'x'}, "
             "{role: 'user', content: 'fine'}])), localStorage.setItem('quire.settings', '{{')")  # fmt: skip
    page.run("void (Storage.prototype.setItem = () => {})")  # the page that goes saves nothing over it
    page.reload()
    page.until("document.body.dataset.state === 'live'")
    assert page.run("[...document.querySelectorAll('.message')].map(m => m.innerText)") == ["fine"]
    limit_tokens(page, 4)
    say(page, "go on")
    assert len(answer(page)) > 0


# ---- hostile text --------------------------------------------------------------------------------------------------

HOSTILE = [
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "<svg onload=window.pwned=1><iframe src='javascript:parent.pwned=1'></iframe>",
    "[click](javascript:window.pwned=1) [c](JaVaScRiPt:pwned=1) [d](data:text/html,<b>x</b>) [e](vbscript:x)",
    "![picture](http://stranger.example/x.png) <link rel=stylesheet href=http://stranger.example/x.css>",
    '`<b onclick=window.pwned=1>` **<u onmouseover=window.pwned=1>** [<i>](http://a.example/"onclick="x)',
    "<style>body{display:none}</style><meta http-equiv=refresh content='0;url=http://stranger.example'>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_says_is_text(page: Page, text: str) -> None:
    limit_tokens(page, min(500 - len(text) - 20, 2 * len(text) + 60))
    say(page, text)
    assert page.run("window.pwned") is None
    inside = page.run(
        "[...document.querySelectorAll('#messages .body *')].map(e => e.tagName).filter(t => "
        "!['P','CODE','STRONG','EM','A','BR','S','PRE','H3','UL','OL','LI'].includes(t))"
    )
    assert inside == []
    handlers = page.run(
        "[...document.querySelectorAll('#messages *')].flatMap(e => [...e.attributes].map(a => a.name))"
        ".filter(n => n.startsWith('on'))"
    )
    assert handlers == []
    links = page.run("[...document.querySelectorAll('#messages .body a')].map(a => [a.protocol, a.rel, a.target])")
    assert all(protocol in ("http:", "https:", "mailto:") and "noopener" in rel and target == "_blank"
               for protocol, rel, target in links)  # fmt: skip
    page.reload()  # the same again from storage
    page.until("document.body.dataset.state === 'live'")
    assert page.run("window.pwned") is None and page.run("document.querySelectorAll('#messages img').length") == 0


def test_markdown_is_shown_as_markdown(page: Page) -> None:
    """Through the module itself: the fake model can only repeat one line."""
    source = (
        "# Title\n\nSome **bold**, *thin* and `code`.\n\n1. one\n2. two\n   - inner\n\n> said\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n\nhttps://a.example/x_y"
    )
    page.run(
        "import('./console/files/markdown.js').then(m => { const e = document.createElement('div'); e.id = 'probe'; "
        f"document.body.append(e); new m.Markdown(e).show({json.dumps(source)}); }})"
    )
    found = page.run("[...document.querySelectorAll('#probe *')].map(e => e.tagName).join(' ')")
    for tag in ("H3", "STRONG", "EM", "CODE", "OL LI LI UL LI", "BLOCKQUOTE P", "THEAD TR TH TH", "PRE CODE", "A"):
        assert tag in found, (tag, found)
    assert page.run("document.querySelector('#probe pre code').textContent") == "print('<b>')"
    assert page.run("document.querySelector('#probe a').href") == "https://a.example/x_y"


def test_markdown_takes_its_time_from_nobody(page: Page) -> None:
    hostile = ["`" * 3000, "*" * 3000, "[" * 3000, "#" + " " * 3000 + "x", "> " * 1500, "- " * 1500, "|" * 3000,
               "_a" * 1500, "~~a" * 1000, "[a](" * 1000, "\\n".join("  " * i + "- x" for i in range(60))]  # fmt: skip
    taken = page.run(
        "import('./console/files/markdown.js').then(m => { const began = performance.now(); "
        f"for (const text of {json.dumps(hostile)}) new m.Markdown(document.createElement('div')).show(text); "
        "return performance.now() - began; })"
    )
    assert taken < 5000


def test_the_policy_holds_even_if_a_script_tried(chromium: Browser, server: Live) -> None:
    page = chromium.page(server.url + "/")
    page.until("document.body.dataset.state === 'live'")
    assert page.run("(() => { try { document.body.innerHTML = '<b>'; return 'set' } catch (e) { return e.name } })()") \
        == "TypeError"  # fmt: skip
    page.run("(() => { const s = document.createElement('img'); s.src = 'http://stranger.example/x.png'; "
             "document.body.append(s) })()")  # fmt: skip
    page.until("true")
    assert any("Content Security Policy" in words for words in page.complaints())
    page.close()


# ---- the engine at work --------------------------------------------------------------------------------------------


def test_the_engine_view_moves_under_load(page: Page, server: Live) -> None:
    Pace.seconds = 0.02
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            server.post("/v1/completions", {"prompt": "abcd" * 20, "max_tokens": 80, "temperature": 0})

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        page.until("Number(document.getElementById('running').textContent) >= 2")
        page.until("Number(document.getElementById('rate-generated').textContent) > 10")
        page.until("parseFloat(document.getElementById('kv').textContent) > 0")
        page.until("parseFloat(document.getElementById('prefix').textContent) > 20")
        page.until("document.querySelectorAll('#ended li').length >= 4")
        page.until("(document.querySelector('#spark-generated .line').getAttribute('d') ?? '').length > 20")
        widths = page.run(
            "[...document.querySelectorAll('#ended li:first-child .phases span')].map(s => s.offsetWidth)"
        )
        assert widths[2] > 5, "the answer's part of the bar"
    finally:
        stop.set()
        Pace.seconds = 0.0
        for asker in askers:
            asker.join()
    page.until("document.getElementById('running').textContent === '0'")


def test_it_asks_at_most_once_a_second(page: Page) -> None:
    before = sum(r["url"].endswith("/console/stats") for r in page.requests())
    began = time.monotonic()
    page._browser.pump(4.0)
    asked = sum(r["url"].endswith("/console/stats") for r in page.requests()) - before
    assert 1 <= asked <= time.monotonic() - began + 1


def test_a_server_that_is_gone_is_said(chromium: Browser, tmp_path: Any) -> None:
    with live_fake(tmp_path, engine={"disable_log_stats": False}) as server:
        page = chromium.page(server.url + "/")
        page.until("document.body.dataset.state === 'live'")
    page.until("document.body.dataset.state === 'lost'")
    page.run("document.getElementById('input').focus()")
    page.type("anybody?")
    page.press("Enter")
    assert "does not answer" in page.until("document.querySelector('.assistant .error')?.textContent")
    page.close()


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_every_call_carries_it(chromium: Browser, tmp_path: Any) -> None:
    with live_fake(tmp_path, api_key=("open-sesame",), engine={"disable_log_stats": False}) as server:
        page = chromium.page(server.url + "/")
        page.until("document.getElementById('key-dialog').open")
        page.type("wrong")
        page.press("Enter")
        page.until("document.getElementById('key-error').textContent.includes('not accepted')")
        asked_before = len(page.requests())
        page.type("open-sesame")
        page.press("Enter")
        page.until("!document.getElementById('key-dialog').open")
        page.until("document.body.dataset.state === 'live'")
        limit_tokens(page, 4)
        say(page, "let me in")
        assert len(answer(page)) > 0
        data = [r for r in page.requests()[asked_before:] if "/console/files/" not in r["url"]]
        assert len(data) >= 3
        assert all(r["headers"].get("Authorization") == "Bearer open-sesame" for r in data), data
        assert "open-sesame" not in page.run("JSON.stringify({...localStorage})")
        page.reload()
        page.until("document.body.dataset.state === 'live'")
        assert not page.run("document.getElementById('key-dialog').open"), "the tab remembers"
        page.close()
        fresh = chromium.page(server.url + "/docs")
        fresh.until("document.getElementById('key-dialog').open")
        fresh.run("document.getElementById('key').focus()")
        fresh.type("open-sesame")
        fresh.press("Enter")
        fresh.until("document.querySelectorAll('.operation').length > 10")
        fresh.close()


# ---- looks and hands -----------------------------------------------------------------------------------------------

PAPER = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_and_the_button_turns_it(chromium: Browser, server: Live, dark: bool) -> None:
    page = chromium.page(server.url + "/", dark=dark)
    assert (page.run(PAPER) < 380) is dark
    page.click("#theme-button")
    assert (page.run(PAPER) < 380) is not dark
    page.reload()
    assert (page.run(PAPER) < 380) is not dark, "the choice is remembered"
    page.close()


@pytest.mark.parametrize("width", [400, 320])
def test_a_narrow_window_holds_everything(chromium: Browser, server: Live, width: int) -> None:
    page = chromium.page(server.url + "/", width=width, height=760)
    page.until("document.body.dataset.state === 'live'")
    limit_tokens(page, 200)
    say(page, "a word that is far too long for a narrow window: " + "w" * 120)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(
        "document.querySelector('.scroller').scrollWidth <= document.querySelector('.scroller').clientWidth"
    )
    box = page.run("(() => { const r = document.getElementById('send').getBoundingClientRect(); "
                   "return [r.left, r.right, r.bottom] })()")  # fmt: skip
    assert box[0] > 0 and box[1] <= width and box[2] <= 760
    assert "running" in page.run("document.getElementById('strip').innerText")
    page.click("#strip")
    page.until("(() => { const r = document.getElementById('engine').getBoundingClientRect(); "
               f"return r.left >= 0 && r.right <= {width} + 1 }})()")  # fmt: skip
    page.press("Escape")
    page.until(f"document.getElementById('engine').getBoundingClientRect().left >= {width}")
    page.close()


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    page.run("document.activeElement.blur()")
    page.press("/")
    assert page.run("document.activeElement.id") == "input" and page.run("document.activeElement.value") == ""
    page.type("first")
    page.press("Enter", shift=True)
    page.type("second")
    assert page.run("document.getElementById('input').value") == "first\nsecond"
    limit_tokens(page, 4)
    page.press("Enter")
    page.until(f"{ANSWERS} === 1 && {ENDED}")
    page.press("s", alt=True)
    page.until("document.getElementById('settings-dialog').open")
    page.press("Escape")
    page.until("!document.getElementById('settings-dialog').open")
    page.press("e", alt=True)
    page.until("getComputedStyle(document.getElementById('engine')).display === 'none'")
    page.press("n", alt=True)
    page.until("document.querySelectorAll('.message').length === 0")
    seen = set()
    for _ in range(20):
        page.press("Tab")
        seen.add(page.run("document.activeElement.id"))
    assert {"new-button", "settings-button", "theme-button", "engine-button", "input"} <= seen
    unnamed = page.run(
        "[...document.querySelectorAll('button, input, textarea, select')].filter(e => !(e.innerText || "
        "e.getAttribute('aria-label') || e.labels?.length)).map(e => e.id)"
    )
    assert unnamed == []


# ---- /docs ---------------------------------------------------------------------------------------------------------


def test_docs_need_no_other_site_and_can_try_a_route(chromium: Browser, server: Live) -> None:
    page = chromium.page(server.url + "/docs")
    page.until("document.querySelectorAll('.operation').length > 10")
    page.run("document.getElementById('filter').focus()")
    page.type("get /version")
    page.until("document.querySelectorAll('.operation:not([hidden])').length === 1")
    page.click(".operation:not([hidden]) summary")
    page.click(".operation:not([hidden]) .try button")
    shown = page.until("/\"version\"/.test(document.querySelector('.operation:not([hidden]) .try pre').textContent) && "
                       "document.querySelector('.operation:not([hidden]) .try pre').textContent")  # fmt: skip
    assert shown.startswith("HTTP 200")
    hosts = {urlsplit(r["url"]).netloc for r in page.requests()}
    assert hosts == {urlsplit(server.url).netloc} and not page.complaints()
    page.close()
