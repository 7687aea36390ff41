"""One run per OUTPUT: who gets the lock, what the others are told, and what is left of a run that was killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from written import Convert, Make

from attention.errors import Failure
from convert.output.lock import exclusive, lock_path

HOLDER = """
import sys, time
from pathlib import Path
from convert.output.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -c SCRIPT ARGUMENTS`; all are killed at the end."""
    running: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def held_by(process: subprocess.Popen[str]) -> None:
    """Wait until the process has the lock."""
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"


def refusal(output: Path) -> Failure:
    with pytest.raises(Failure) as caught, exclusive(output):
        pass
    return caught.value


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_the_lock_file_lies_beside_output_names_its_holder_and_goes(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive(tmp_path / "out"):
            holder = (tmp_path / "out.lock").read_text()
            assert holder.startswith(f"kvfold: process {os.getpid()} on {os.uname().nodename}, since 20")
        assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_is_not_ours_any_more_stays(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out"):
        (tmp_path / "out.lock").unlink()
        (tmp_path / "out.lock").write_text("of somebody else")
    assert (tmp_path / "out.lock").read_text() == "of somebody else"


def test_two_never_hold_it_however_often_it_is_removed(tmp_path: Path) -> None:
    """Each run opens the file, which the one before may have removed since."""
    inside, most, times = [0], [0], [0]

    def run() -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            with contextlib.suppress(Failure), exclusive(tmp_path / "out"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1
                times[0] += 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert times[0] > 10
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made(tmp_path: Path) -> None:
    with exclusive(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b" / "out.lock").is_file()


def test_a_link_and_what_it_points_to_have_one_lock(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert lock_path(tmp_path / "link") == tmp_path / "out.lock"
    with exclusive(tmp_path / "link"):
        assert "another run is writing" in str(refusal(tmp_path / "out"))


def test_one_process_gets_it_once_whether_nested_or_in_another_thread(tmp_path: Path) -> None:
    told: list[Failure] = []
    with exclusive(tmp_path / "out"):
        thread = threading.Thread(target=lambda: told.append(refusal(tmp_path / "out")))
        thread.start()
        thread.join()
        told.append(refusal(tmp_path / "out"))
        with exclusive(tmp_path / "other"):
            pass
    assert len(told) == 2
    assert all("another run is writing" in str(error) and f"process {os.getpid()} on" in str(error) for error in told)
    with exclusive(tmp_path / "out"):
        pass


def test_a_directory_and_what_lies_in_it_have_locks_of_their_own(tmp_path: Path) -> None:
    with exclusive(tmp_path / "sweep"), exclusive(tmp_path / "sweep" / "gqa-2-mean"):
        pass


def test_a_killed_holder_releases_it(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    out = tmp_path / "out"
    holder = start(HOLDER, out)
    held_by(holder)
    told = refusal(out)
    assert told.exit_code == 1
    assert f"process {holder.pid} on {os.uname().nodename}, since 20" in str(told)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with exclusive(out):
        assert f"process {os.getpid()} " in lock_path(out).read_text()


def test_the_refused_are_told_at_once(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out"):
        began = time.monotonic()
        refusal(tmp_path / "out")
        assert time.monotonic() - began < 0.3


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 40, b"{", b"\xff\xfe\x00", b'{"kvfold": 1, "pid": [], "machine": 5}', b"kvfold: \x1b[31m" + b"x" * 4000,
    ],
    ids=range(6),
)  # fmt: skip
def test_a_holder_that_names_nobody_still_holds_it(content: bytes, tmp_path: Path) -> None:
    with (tmp_path / "out.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        told = str(refusal(tmp_path / "out"))
    assert "another run is writing" in told or "is in the way" in told
    assert told.isprintable()


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"kvfold": 1, "pid"', b"kvfold: process 99999999 on " + b"x" * 4000])
def test_what_a_killed_run_left_in_it_is_overwritten(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "out.lock").write_bytes(content)
    with exclusive(tmp_path / "out"):
        assert f"process {os.getpid()} " in (tmp_path / "out.lock").read_text()


def test_a_lock_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("# @generated by Poetry")
    assert "poetry.lock is in the way, and no conversion made it" in str(refusal(tmp_path / "poetry"))
    assert (tmp_path / "poetry.lock").read_text() == "# @generated by Poetry"


# ---- machines that cannot --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = refusal(tmp_path / "out")
    assert "cannot lock" in str(told)
    assert os.strerror(number) in str(told)
    assert told.hint is not None


def test_a_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.output.lock.FileLock", filelock.SoftFileLock)
    assert "this system has no file locks" in str(refusal(tmp_path / "out"))


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_parent_that_takes_no_file_is_one_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("out.lock"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(os, "open", opened)
    told = str(refusal(tmp_path / "out"))
    assert told == f"cannot lock {tmp_path / 'out'}: {tmp_path / 'out.lock'}: {os.strerror(number)}"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory in which no file can be made")
def test_a_directory_in_which_no_file_can_be_made_is_one_line() -> None:
    assert str(refusal(Path("/proc/out"))) == "cannot lock /proc/out: /proc/out.lock: no file can be made there"


def test_a_disk_too_full_for_the_holders_name_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("convert.output.lock.os.ftruncate", full)
        assert "No space left on device" in str(refusal(tmp_path / "out"))
    assert not list(tmp_path.iterdir())
    with exclusive(tmp_path / "out"):
        pass


@pytest.mark.parametrize("name", ["file/out", "directory"])
def test_what_lies_in_the_way_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory.lock").mkdir()
    assert "cannot lock" in str(refusal(tmp_path / name))


# ---- commands --------------------------------------------------------------------------------------------------------

# Runs `convert`, which waits before its first shard until the file GO is there, in ten processes at once, forked when all is
# imported. GO comes when nine have ended; then what became of each.
TEN = """
import json, os, signal, sys, time
from pathlib import Path
import convert.execute.weights as execute
from convert.command.cli import main
go, write = Path(sys.argv[1]), execute.write_shard
def slow(*given):
    while not go.exists():
        time.sleep(0.02)
    return write(*given)
execute.write_shard = slow
signal.alarm(120)
main([*sys.argv[2:], "--groups", "2", "--dry-run"], standalone_mode=False)
said, ended = go.with_name("said"), {}
for groups in [2, 1] * 5:
    if not os.fork():
        signal.alarm(120)
        os.dup2(os.open(said.with_name(f"said-{os.getpid()}"), os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["convert", *sys.argv[2:], "--groups", str(groups)]
        try:
            main()
        except SystemExit as end:
            os._exit(end.code or 0)
for _ in range(9):
    ended.update([os.wait()])
go.touch()
ended.update([os.wait()])
said = {pid: (os.waitstatus_to_exitcode(status), said.with_name(f"said-{pid}").read_text()) for pid, status in ended.items()}
print(json.dumps(said))
"""


@pytest.mark.slow
def test_of_ten_simultaneous_starts_one_wins_and_the_others_name_it(
    checkpoint: Make, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    ten = start(TEN, tmp_path / "go", "gqa", checkpoint(), out, "--method", "mean", "--overwrite")
    stdout, stderr = ten.communicate(timeout=120)
    assert ten.returncode == 0, stderr
    ended = json.loads(stdout.splitlines()[-1])
    winners = [pid for pid, (code, _) in ended.items() if code == 0]
    assert len(ended) == 10
    assert len(winners) == 1
    for pid, (code, said) in ended.items():
        if pid not in winners:
            assert code == 1, said
            assert said.startswith("error: another run is writing")
            assert f"process {winners[0]} on " in said
            assert "--method mean" in said, "the command is named, too"
    config, provenance = (json.loads((out / name).read_text()) for name in ("config.json", "conversion.json"))
    assert config["num_key_value_heads"] == provenance["recipe"]["gqa"]["groups"]


def test_a_result_that_has_appeared_since_the_plan_is_not_replaced(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run began later and has ended by the time that this one gets the lock."""
    from convert.output import writing

    source, out = checkpoint(), tmp_path / "out"
    real = writing.exclusive

    def late(output: Path) -> Any:
        monkeypatch.setattr(writing, "exclusive", real)
        assert convert("gqa", source, output, "--groups", 1, "--method", "mean").exit_code == 0
        return real(output)

    monkeypatch.setattr(writing, "exclusive", late)
    result = convert("gqa", source, out, "--groups", 2, "--method", "mean")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1


def test_a_sweep_holds_its_directory(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a line of text, and another\n" * 40)
    command = ["sweep", checkpoint(), out, "--groups", 2, "--methods", "mean", "--evaluate", text, "--max-tokens", 128, "-q"]
    with exclusive(out):
        result = convert(*command)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: another run is writing {out}: process {os.getpid()} on")
    assert not out.exists()
    with exclusive(out / "gqa-2-mean"):
        result = convert(*command)
    assert result.exit_code == 1
    assert f"another run is writing {out / 'gqa-2-mean'}: process {os.getpid()} on" in result.stderr
    assert convert(*command).exit_code == 0
