"""Pictures of the console for docs/: `python tools/console_shots.py [FOLDER]`, with the embedded model and a Chromium.

A few requests run beside the chat, so that the engine view has something to show.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.chromium import Page, browser  # noqa: E402
from tests.server.live import Live, live  # noqa: E402

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")
NAME = "SmolLM2-135M-Instruct"
ENDED = "!document.body.classList.contains('busy')"
LIVE = "document.body.dataset.state === 'live'"


def load(server: Live, stop: threading.Event, number: int) -> None:
    while not stop.is_set():
        asked = [{"role": "user", "content": f"Tell me a short story about the number {number % 3}."}]
        server.post("/v1/chat/completions", {"messages": asked, "max_tokens": 20 + 25 * number})
        stop.wait(0.4 * number)


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter")
    page.until("document.body.classList.contains('busy')")
    page.until(ENDED)


def main(folder: Path) -> None:
    engine = {"max_model_len": 2048, "served_model_name": NAME, "disable_log_stats": False, "max_num_seqs": 8,
              "num_gpu_blocks_override": 140}  # fmt: skip
    stop = threading.Event()
    with live(engine=engine) as server, browser() as chromium:
        askers = [threading.Thread(target=load, args=(server, stop, number)) for number in range(1, 5)]
        for asker in askers:
            asker.start()
        page = chromium.page(server.url + "/", width=1280, height=800)
        page.until(LIVE)
        for question in QUESTIONS:
            ask(page, question)
        time.sleep(45)
        page.shot(folder / "console-light.png")
        page.click("#theme-button")
        page.shot(folder / "console-dark.png")
        page.click("#theme-button")
        page.resize(400, 800)
        time.sleep(2)  # the engine view slides out
        page.shot(folder / "console-narrow.png")
        stop.set()
        for asker in askers:
            asker.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
