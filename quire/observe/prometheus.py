"""The /metrics page: what was counted, in Prometheus's text format or in OpenMetrics, as the scraper asks.

In: sheets (metrics.py, http.py). Out: bytes and their content type, made by prometheus_client's own exposition. Every
page is of all processes that share the engine. Must not know: HTTP frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, core, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from quire.base import env
from quire.observe.declared import MetricDeclaration
from quire.observe.reader import Counter, Gauge, Histogram, Metric, Summary
from quire.observe.sheet import Sheet

_OPENMETRICS = "application/openmetrics-text"
_VERSION = "1.0.0"
# Every name here is valid under every escaping. prometheus_client 0.26 escapes the colon all the same, in samples and
# not in TYPE lines, when a scraper asks for OpenMetrics without naming an escaping; Prometheus 2 does.
_AS_THEY_ARE = openmetrics.ALLOWUTF8


class MetricSource(Protocol):
    """Whoever counts: Metrics, HttpMetrics."""

    @property
    def sheet(self) -> Sheet: ...
    def snapshot(self) -> list[Metric]: ...


class Page:
    """One per process that answers /metrics. `alone`: no other process serves, so this one's own numbers are shown."""

    def __init__(self, sources: Sequence[MetricSource], *, alone: bool = True) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        if alone:
            ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(sources))

    def render(self, accept: str = "", names: Iterable[str] = ()) -> tuple[bytes, str]:
        """The page for a scraper's Accept header; `names` picks samples by their full names."""
        selected = list(names)
        registry = self._registry.restricted_registry(selected) if selected else self._registry
        _, content_type = exposition.choose_encoder(accept)
        if content_type.startswith(_OPENMETRICS):
            body: bytes = openmetrics.generate_latest(registry, _AS_THEY_ARE)  # type: ignore[no-untyped-call]
            return body, re.sub(r"version=[^;]*", f"version={_VERSION}", content_type)
        return exposition.generate_latest(registry, escaping=_AS_THEY_ARE), content_type


class _Collector:
    def __init__(self, sources: Sequence[MetricSource]) -> None:
        self._sources = sources

    def describe(self) -> list[core.Metric]:
        """Names as they are known to a registry that picks by name."""
        return [family for source in self._sources for family in _families(source, [])]

    def collect(self) -> Iterator[core.Metric]:
        for source in self._sources:
            yield from _families(source, source.snapshot())


def _families(source: MetricSource, metrics: list[Metric]) -> Iterator[core.Metric]:
    grouped: dict[str, list[Metric]] = {}
    for metric in metrics:
        grouped.setdefault(metric.name, []).append(metric)
    created = None if env.PROMETHEUS_DISABLE_CREATED_SERIES.get() else source.sheet.created()
    for entry in source.sheet.table:
        for name in (entry.name, *entry.old_names):
            yield _family(name, entry, grouped.get(entry.name, []), created)


def _family(name: str, entry: MetricDeclaration, metrics: list[Metric], created: float | None) -> core.Metric:
    doc = entry.doc if name == entry.name else f"Old name of {entry.name}. {entry.doc}"
    family = core.Metric(name, doc, entry.kind)
    for metric in metrics:
        labels = metric.labels
        if isinstance(metric, Gauge):
            family.add_sample(name, labels, metric.value)
            continue
        if isinstance(metric, Counter):
            family.add_sample(f"{name}_total", labels, metric.value)
        elif isinstance(metric, Histogram):
            for bound, count in metric.buckets.items():
                family.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
        if isinstance(metric, Histogram | Summary):
            family.add_sample(f"{name}_count", labels, metric.count)
            family.add_sample(f"{name}_sum", labels, metric.sum)
        if created is not None:
            family.add_sample(f"{name}_created", labels, created)
    return family
