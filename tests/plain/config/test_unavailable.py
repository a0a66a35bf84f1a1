"""The table of options that Quire does not have: every row is whole and in use, and what is outside the table works."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs, EngineConfig, groups, option, unavailable
from quire.config.option import LATER, READY, Group, declarations, parts
from quire.config.server import ServerConfig
from quire.config.table import group_of, refuse_unbuilt, table
from quire.schema.errors import NotBuiltError

TEXT = (Path(unavailable.__file__).parent / "unavailable.txt").read_text(encoding="utf-8")
CLASSES: dict[str, type[Group]] = {
    kind.__name__: kind
    for kind in (*(getattr(groups, name) for name in groups.__all__), ServerConfig)
    if isinstance(kind, type) and issubclass(kind, Group)
}
ROWS = [(group, row) for group, rows in unavailable.all_rows().items() for row in rows]


def test_every_section_is_a_config_class_and_every_row_one_of_its_options() -> None:
    assert set(unavailable.all_rows()) <= set(CLASSES)
    for group, row in ROWS:
        declared = declarations(CLASSES[group])[row.field].option
        assert (declared.doc, declared.why, declared.name, declared.flags) == (row.doc, row.why, row.name, row.flags)
        assert declared.status is not READY


@pytest.mark.parametrize(("group", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value.field)
def test_a_row_says_since_when_and_why_not(group: str, row: unavailable.UnavailableRow) -> None:
    assert row.since in ("0.13", "<0.32", "0.32")
    assert row.doc.endswith(".") and row.why and not row.why.endswith(".")
    assert re.fullmatch("[a-z][a-z0-9_]*", row.field) and all(flag.startswith("-") for flag in row.flags)


def test_every_reason_is_used_and_the_text_has_no_row_twice() -> None:
    _, reasons = unavailable._read()
    used = {line.rpartition(" ")[2] for line in TEXT.splitlines() if re.search(r"\| (refused|inert) \S+$", line)}
    assert set(reasons) == used
    assert (
        len({(group, row.field) for group, row in ROWS}) == len(ROWS) == TEXT.count("| refused") + TEXT.count("| inert")
    )


def test_types_written_in_a_class_are_those_of_the_row() -> None:
    for group, row in ROWS:
        field = next(f for f in dataclasses.fields(CLASSES[group]) if f.name == row.field)
        assert field.type == unavailable.read_kind(row.kind, CLASSES), f"{group}.{row.field}"


def test_what_is_not_in_the_table_works() -> None:
    """Every declared option can be set to something that has an effect."""
    listed = {(group, row.field) for group, row in ROWS}
    idle = []
    for name, kind in CLASSES.items():
        for field, mine in declarations(kind).items():
            o = mine.option
            if (name, field) in listed or o.status is READY:
                continue
            if not [value for value in o.ready if value not in (None, False, o.unset, o.default)]:
                idle.append(f"{name}.{field}")
    assert not idle


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "prefill_context_parallel_size",
            2,
            "decode_context_parallel_size divides their KV; leave prefill_context_parallel_size at 1",
        ),
        ("max_lora_cls_labels", 2, "each layer and expert by itself; leave max_lora_cls_labels at None"),
        (
            "kv_transfer_config",
            {"kv_connector": "x"},
            "neither sends nor receives KV; leave kv_transfer_config at None",
        ),
        ("enable_mfu_metrics", True, "this version does not measure it"),
        ("enable_elastic_ep", True, "the ranks that were started, whose number does not change"),
        ("enable_shm_tensor_arena", True, "are sent between processes in messages"),
        (
            "fault_tolerance_config",
            {"engine_recovery_timeout_sec": 1},
            "engines are started once, and know of each other",
        ),
    ],
)
def test_a_refusal_says_which_feature_is_missing(name: str, value: Any, words: str) -> None:
    with pytest.raises(NotBuiltError, match=re.escape(words)) as refused:
        EngineArgs(model="x", **{name: value}).create_engine_config()
    assert str(refused.value).startswith(f"{name}=")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_dbo", "its collectives are not overlapped with its arithmetic"),
        ("dbo_decode_token_threshold", "its collectives are not overlapped with its arithmetic"),
        ("enable_batch_sharded_sampling", "samples the whole batch, so that no token is sent around"),
        ("enable_hc_sp", "no model of this version has hyper-connections"),
        ("max_parallel_loading_workers", "all workers load at once"),
    ],
)
def test_what_has_no_effect_on_ranks_says_why(name: str, words: str) -> None:
    assert declarations(groups.ParallelConfig)[name].option.why.endswith(words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ray_workers_use_nsight", True, "Ray workers are not profiled; --profiler-config profiles every worker"),
        ("ray_runtime_env", {"pip": ["x"]}, "workers have the environment of the cluster"),
        ("placement_group", "mine", "the placement group that the program runs in is used, or one is made"),
    ],
)
def test_what_is_not_passed_on_to_ray(name: str, value: Any, words: str) -> None:
    """Two of them have no flag: only a program can set them."""
    config = EngineConfig(parallel_config=dataclasses.replace(EngineConfig().parallel_config, **{name: value}))
    with pytest.raises(NotBuiltError, match=re.escape(words)) as refused:
        refuse_unbuilt(config)
    assert name in str(refused.value).partition("=")[0]


def test_rows_reach_users_as_any_option_does() -> None:
    args = EngineArgs(max_lora_cls_labels=None)
    assert args.max_lora_cls_labels is None and EngineArgs().swap_space == 4.0
    assert (
        EngineConfig().parallel_config.data_parallel_rank == 0
        and table()["data_parallel_rank"].declared.option.unset is None
    )
    assert group_of(table()["speculative_config"].declared.type) is groups.SpeculativeConfig
    refuse_unbuilt(EngineConfig())


def test_an_option_cannot_be_both_declared_and_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for _, row in ROWS if row.kind == "bool")
    monkeypatch.setattr(option, "rows_of", lambda name: [row])

    class Both(Group):
        """Declares what the table has."""

    Both.__annotations__ = {row.field: bool}
    setattr(Both, row.field, option.option(False, "Mine."))
    with pytest.raises(AssertionError, match=r"is in unavailable\.txt too"):
        option.group(Both)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int?", int | None), ("list[str]", tuple[str, ...]), ("str|list[int]?", str | tuple[int, ...] | None),
        ("dict", dict[str, Any]),
    ],
)  # fmt: skip
def test_kinds_are_types(text: str, kind: Any) -> None:
    assert parts(unavailable.read_kind(text, {})) == parts(kind)


def test_values_with_limits_and_known_names() -> None:
    assert unavailable._value("float? >0 <=1") == ("float?", (), {"above": 0.0, "high": 1.0})
    assert unavailable._value("str (a/b)") == ("str", ("a", "b"), {})
    assert unavailable._defaults("None or 'x'") == (None, "x") and unavailable._defaults("1.5") == (1.5,)
    assert declarations(groups.LoRAConfig)["max_lora_cls_labels"].option.status is LATER
