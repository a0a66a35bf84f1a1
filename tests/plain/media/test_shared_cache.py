"""Processed media in memory that processes share: what one puts there another finds, and the oldest make room."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.config import MultiModalConfig
from quire.media import shared_cache
from quire.media.families import make_family
from quire.media.families.base import ProcessedItem
from quire.media.inputs import MediaInputs
from quire.media.settings import ProcessorFiles
from quire.media.shared_cache import SharedCache, shared_memory
from quire.media.sources import MediaSources
from quire.media.workers import MediaWorkers
from quire.schema.errors import ConfigError, InputError

SIZE = 10_000


def name_of(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def item_of(value: int, num: int = 500) -> ProcessedItem:
    return ProcessedItem({"x": np.full(num, value, np.float32)}, f"text {value}", value + 1)


def value_of(item: ProcessedItem | None) -> int | None:
    if item is None:
        return None
    numbers = set(np.frombuffer(item.arrays["x"].data, np.float32).tolist())
    assert len(numbers) == 1 and item.text == f"text {int(min(numbers))}" and item.num_vectors == min(numbers) + 1
    return int(min(numbers))


@pytest.fixture
def cache() -> Iterator[SharedCache]:
    made = SharedCache(shared_memory(SIZE), SIZE)
    yield made
    made.close()


def test_the_oldest_make_room(cache: SharedCache) -> None:
    for value in range(40):
        cache.put(name_of(str(value)), item_of(value, 100 + 37 * value % 800))
        assert value_of(cache.get(name_of(str(value)))) == value
        kept = [one for one in range(value + 1) if value_of(cache.get(name_of(str(one)))) == one]
        assert kept == list(range(value + 1 - len(cache), value + 1)) and len(kept) >= 1
    cache.put(name_of("39"), item_of(5))
    assert value_of(cache.get(name_of("39"))) == 39  # what a key names does not change
    cache.clear()
    assert not len(cache) and cache.get(name_of("39")) is None
    cache.put(name_of("39"), item_of(7))
    assert value_of(cache.get(name_of("39"))) == 7


def test_more_items_than_the_table_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "_SLOTS", 5)
    cache = SharedCache(shared_memory(SIZE), SIZE)
    for value in range(23):
        cache.put(name_of(str(value)), item_of(value, 2))
    assert [one for one in range(23) if cache.get(name_of(str(one)))] == list(range(18, 23))
    cache.close()


def test_large_items_are_not_kept() -> None:
    cache = SharedCache(shared_memory(SIZE), 3000)
    cache.put(name_of("small"), item_of(1, 500))
    cache.put(name_of("large"), item_of(2, 800))
    assert value_of(cache.get(name_of("small"))) == 1 and cache.get(name_of("large")) is None
    cache.close()


OTHER = """
import sys
from tests.plain.media.test_shared_cache import SIZE, item_of, name_of, value_of
from quire.media.shared_cache import SharedCache
cache = SharedCache(int(sys.argv[1]), SIZE)
assert value_of(cache.get(name_of("parent"))) == 3
for value in range(300):
    cache.put(name_of(f"child {value}"), item_of(value % 50, 100))
    assert value_of(cache.get(name_of(f"child {value}"))) in (None, value % 50)
cache.put(name_of("last"), item_of(9, 10))
"""


def test_another_process_finds_and_keeps() -> None:
    """While this one puts its own."""
    descriptor = shared_memory(SIZE)
    cache = SharedCache(descriptor, SIZE)
    cache.put(name_of("parent"), item_of(3))
    child = subprocess.Popen([sys.executable, "-c", OTHER, str(descriptor)], pass_fds=(descriptor,))
    while child.poll() is None and cache.get(name_of("child 20")) is None and cache.get(name_of("last")) is None:
        value_of(cache.get(name_of("parent")))
    for value in range(200):
        cache.put(name_of(f"own {value}"), item_of(value % 50, 90))
        for name in (f"own {value}", f"child {value}"):
            assert value_of(cache.get(name_of(name))) in (None, value % 50)
        if child.poll() is not None:
            break
    assert child.wait(60) == 0
    cache.put(name_of("after"), item_of(4))
    assert value_of(cache.get(name_of("after"))) == 4
    cache.close()


def test_threads(cache: SharedCache) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for value in range(60):
            cache.put(name_of(f"{seed} {value}"), item_of(value, 50 + 13 * seed))
            if value_of(cache.get(name_of(f"{seed} {value}"))) not in (None, value):
                wrong.append((seed, value))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_items_are_known_to_inputs_of_another_process() -> None:
    """Two MediaInputs on one memory: a uuid that one was given an image for names it for the other."""
    memory = shared_memory(1 << 24)
    files = ProcessorFiles(config={"vision_config": {"patch_size": 14, "image_size": 28}})
    made = []
    for descriptor in (memory, os.dup(memory)):
        options = MultiModalConfig(mm_processor_cache_type="shm", shared_memory=descriptor)
        made.append(MediaInputs(make_family("LlavaProcessor", files), MediaSources(), options,
                                workers=MediaWorkers(1)))  # fmt: skip
    first, second = made
    sent = {"image": [Image.new("RGB", (40, 30), (9, 8, 7))]}
    uuids = {"image": ["a"]}
    (loaded,) = first.loaded(first.load(sent, uuids)).items["image"]
    (again,) = second.loaded(second.load({"image": [None]}, uuids)).items["image"]
    assert again.key == loaded.key and again.sent == loaded.sent and again.item.text == loaded.item.text
    second.clear()
    with pytest.raises(InputError, match="not in the cache"):
        first.loaded(first.load({"image": [None]}, uuids))
    for one in made:
        one.close()


def test_options() -> None:
    with pytest.raises(ConfigError, match="for mm_processor_cache_type='shm' only"):
        MultiModalConfig(mm_shm_cache_max_object_size_mb=2)
    assert MultiModalConfig(mm_processor_cache_type="shm", mm_shm_cache_max_object_size_mb=2)


def test_memory_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(mmap, "mmap", fail)
    descriptor = shared_memory(1000)
    with pytest.raises(
        ConfigError, match="mm_processor_cache_gb: 1000 bytes of shared memory cannot be mapped: no room"
    ):
        SharedCache(descriptor, 100)
    with pytest.raises(OSError, match="Bad file descriptor"):  # it is closed
        os.fstat(descriptor)
