"""Live servers of tiny pooling models, for the tests of routes and those of clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.pooling_models import make_pooling
from tests.server.live import Live, live

TEXTS = ["the cat is a dog", "river", "the stone bridge . the boat"]


@contextmanager
def embedding_server(folder: Path, **options: Any) -> Iterator[Live]:
    """`emb`, whose embeddings may be shortened. What lies in the folder already stays."""
    if not (folder / "config.json").exists():
        make_pooling("BertModel", folder)
    engine = {"dtype": "float32", "served_model_name": "emb", "hf_overrides": {"is_matryoshka": True}}
    with live(str(folder), engine=engine, **options) as server:
        yield server


@contextmanager
def ranking_server(folder: Path) -> Iterator[Live]:
    """`rank`, a cross-encoder."""
    make_pooling("BertForSequenceClassification", folder, num_labels=1)
    with live(str(folder), engine={"dtype": "float32", "served_model_name": "rank"}) as server:
        yield server
