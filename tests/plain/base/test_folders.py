"""base/folders.py: what a killed process leaves behind goes with the next start, and nothing else does."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.base.folders import make_folder, remove_folder, sweep_folders
from quire.base.sockets import private_folder

_OWNER = "from quire.base.sockets import private_folder; print(private_folder(), flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, for the sockets; and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="folders-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_owners_folder_is_swept_by_the_next_start_and_a_living_ones_is_not() -> None:
    (killed, left), (living, used) = owner(), owner()
    try:
        (left / "engine").write_text("a mailbox")
        kill(killed)
        assert left.is_dir()
        mine = Path(private_folder())
        assert not left.exists() and used.is_dir() and mine.is_dir()
        sweep_folders()
        assert used.is_dir() and mine.is_dir()
        remove_folder(str(mine))
        assert not mine.exists()
    finally:
        kill(living)
    sweep_folders()
    assert not used.exists()


def test_what_is_not_known_to_be_ours_stays(temporary: Path) -> None:
    beside = temporary / "other-folder"
    unlocked, linked, file = temporary / "quire-unlocked", temporary / "quire-linked", temporary / "quire-file"
    beside.mkdir()
    (beside / "owner.lock").touch()
    unlocked.mkdir()  # somebody else's, or one that is just being made
    linked.symlink_to(beside)
    file.touch()
    sweep_folders()
    assert all(path.exists() for path in (beside, beside / "owner.lock", unlocked, linked, file))


def test_a_lock_that_is_a_link_is_not_followed(temporary: Path) -> None:
    folder = temporary / "quire-strange"
    folder.mkdir()
    (temporary / "target").touch()
    (folder / "owner.lock").symlink_to(temporary / "target")
    sweep_folders()
    assert folder.is_dir()


def test_a_folder_is_for_this_user_alone_and_is_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder = make_folder()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    remove_folder(folder)
    assert not os.path.exists(folder) and len(os.listdir("/proc/self/fd")) == before


def test_folders_that_cannot_be_listed_keep_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        sweep_folders()
