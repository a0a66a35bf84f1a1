"""What a device, a link and a host cost: the numbers of the cost model, and nothing else.

The H200's rates were fitted to runs of Quire on one (benchmarks/gpu/calibrate.py says how and how well). Every other
device has the figures of its data sheet, multiplied by what the H200 reaches of its own: Quire was not measured there.
Links were not measured either. Must not know: models, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.schema.errors import InputError

GIB = 1 << 30
_PEAK_MATMUL, _PEAK_BANDWIDTH = 989e12, 4.8e12  # of an H200, by its data sheet


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Between two devices; a collective pays the latency once and the bytes by the bandwidth of one direction."""

    bandwidth: float  # bytes a second, one direction
    latency: float  # seconds


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """What a step reaches, not peaks: bandwidths in bytes a second, rates in operations of 16 bits a second."""

    name: str
    is_measured: bool
    memory_bytes: int
    matmul_rate: float
    expert_rate: float  # of matmuls that are split among experts
    attention_rate: float  # of prompts from their first token
    paged_rate: float  # of pieces of prompts that look back into the KV cache
    weight_bandwidth: float  # of matmuls with few rows
    expert_bandwidth: float  # the same, where each expert has a few rows
    kv_bandwidth: float  # of decodes
    activation_bandwidth: float  # of norms, activations, rotary embeddings and writes to the KV cache
    cached_bandwidth: float  # of what lies in the device's own cache: activations of small steps, keys that rows share
    cache_bytes: int  # of that cache
    layer_seconds: float  # of a layer whatever it computes: kernels start one after another
    batched_layer_seconds: float  # of a layer, more than that, for two rows and more
    mixed_head_seconds: float  # of a head of a layer, more than that, where prompts and decodes share a step
    expert_layer_seconds: float  # of a layer with experts, more than that: the choice of experts
    step_seconds: float  # of a step whatever it computes: embeddings, choice of tokens
    link: LinkModel  # to devices of the same machine
    network: LinkModel  # to devices of other machines
    devices_per_machine: int = 8


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """What processors do around a step and around a request; seconds. docs/features/simulate.md says where each number
    is from: processor time of a real server, or served loads of 0.6B and 8B."""

    plan_seconds: float = 0.30e-3  # plan and launch of a step
    plan_row_seconds: float = 1.5e-6  # for each request in it
    add_seconds: float = 0.1e-3  # for each request that is new in it
    eager_layer_seconds: float = 0.55e-3  # of each layer, to launch the kernels of a step that has no graph
    commit_seconds: float = 0.10e-3  # from the end of a step to its tokens at the server
    commit_row_seconds: float = 2.0e-6
    idle_seconds: float = 3.7e-3  # of the first step after a rest, more than others: all sleep
    least_rest: float = 20e-3  # that is one
    request_seconds: float = 2.8e-3  # of a request on its way in and of its first token on its way out, in no queue
    accept_seconds: float = 0.77e-3  # of the server's processor, for each request
    accept_turns: int = 2  # of its event loop, in which it does that: one more for a new connection
    chunk_seconds: float = 35e-6  # of the server's processor, for each streamed chunk
    token_seconds: float = 13e-6  # of the server's processor, for each token
    silent_share: float = 0.0  # of tokens that are no text by themselves and go out with the next one


@dataclass(frozen=True, kw_only=True)
class ClientModel:
    """What a load generator on one processor does for a request and for a chunk; seconds."""

    request_seconds: float = 0.34e-3  # for each request
    connect_seconds: float = 0.14e-3  # for each new connection, besides
    connect_turns: int = 2  # of its event loop, in which it does that
    chunk_seconds: float = 45e-6  # for each chunk


NVLINK = LinkModel(bandwidth=450e9, latency=10e-6)
NETWORK = LinkModel(bandwidth=50e9, latency=25e-6)  # 400 Gbit/s for each device

H200 = DeviceModel(
    name="H200",
    is_measured=True,
    memory_bytes=139 * GIB,
    matmul_rate=779e12,
    expert_rate=627e12,
    attention_rate=542e12,
    paged_rate=415e12,
    weight_bandwidth=4.33e12,
    expert_bandwidth=4.05e12,
    kv_bandwidth=3.90e12,
    activation_bandwidth=2.07e12,
    cached_bandwidth=14.0e12,
    cache_bytes=50_000_000,
    layer_seconds=16.2e-6,
    batched_layer_seconds=7.6e-6,
    mixed_head_seconds=0.8e-6,
    expert_layer_seconds=5.5e-6,
    step_seconds=44e-6,
    link=NVLINK,
    network=NETWORK,
)


def _by_data_sheet(
    name: str, *, gigabytes: int, megabytes_cache: int, bandwidth: float, matmul_rate: float, link: LinkModel
) -> DeviceModel:
    """The H200's shares of its peaks, of another device's peaks."""
    compute, memory = matmul_rate / _PEAK_MATMUL, bandwidth / _PEAK_BANDWIDTH
    return replace(
        H200,
        name=name,
        is_measured=False,
        memory_bytes=int(gigabytes * 1e9),
        matmul_rate=H200.matmul_rate * compute,
        expert_rate=H200.expert_rate * compute,
        attention_rate=H200.attention_rate * compute,
        paged_rate=H200.paged_rate * compute,
        weight_bandwidth=H200.weight_bandwidth * memory,
        expert_bandwidth=H200.expert_bandwidth * memory,
        kv_bandwidth=H200.kv_bandwidth * memory,
        activation_bandwidth=H200.activation_bandwidth * memory,
        cached_bandwidth=H200.cached_bandwidth * compute,
        cache_bytes=int(megabytes_cache * 1e6),
        link=link,
    )


_PCIE4 = LinkModel(bandwidth=32e9, latency=20e-6)
DEVICES = {
    device.name: device
    for device in (
        H200,
        _by_data_sheet("H100", gigabytes=80, megabytes_cache=50, bandwidth=3.35e12, matmul_rate=989e12, link=NVLINK),
        _by_data_sheet(
            "A100",
            gigabytes=80,
            megabytes_cache=40,
            bandwidth=2.04e12,
            matmul_rate=312e12,
            link=replace(NVLINK, bandwidth=300e9),
        ),
        _by_data_sheet(
            "B200",
            gigabytes=180,
            megabytes_cache=126,
            bandwidth=8.0e12,
            matmul_rate=2250e12,
            link=replace(NVLINK, bandwidth=900e9),
        ),
        _by_data_sheet("L40S", gigabytes=48, megabytes_cache=96, bandwidth=0.864e12, matmul_rate=362e12, link=_PCIE4),
        _by_data_sheet("L4", gigabytes=24, megabytes_cache=48, bandwidth=0.3e12, matmul_rate=121e12, link=_PCIE4),
    )
}


def find_device(name: str) -> DeviceModel:
    """By name, in any case."""
    device = DEVICES.get(name.upper())
    if device is None:
        raise InputError(
            f"--device {name!r} is unknown; choose one of {', '.join(DEVICES)}", param="device", value=name
        )
    return device
