"""Whether the traces asked for can be made: a step of resolve.py."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from quire.config.engine import EngineConfig
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp")


def check_traces(given: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """An endpoint needs OpenTelemetry; details need an endpoint."""
    observe = config.observability_config
    endpoint, details = observe.otlp_traces_endpoint, observe.collect_detailed_traces
    if details and endpoint is None:
        raise ConfigError(
            f"collect_detailed_traces={list(details)} needs otlp_traces_endpoint: traces carry the times",
            param="collect_detailed_traces",
            value=details,
        )
    if endpoint is None:
        return config
    for package in _PACKAGES:
        if not _is_installed(package):
            raise MissingExtraError(f"otlp_traces_endpoint={endpoint!r}", "otel", package)
    if urlsplit(endpoint).scheme not in ("http", "https", "grpc") or not urlsplit(endpoint).netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4317, got {endpoint!r}",
            param="otlp_traces_endpoint",
            value=endpoint,
        )
    if details and {"model", "all"} & set(details) and config.device_config.device == "cuda":
        raise NotBuiltError(
            f"collect_detailed_traces={list(details)}: 'model' is measured on CPU only in this version (a GPU's "
            "forward pass runs by itself); ask for 'worker' to get the time of whole steps",
            param="collect_detailed_traces",
        )
    return config


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
