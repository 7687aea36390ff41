"""What the teacher says, kept on disk: training by it is training by the teacher itself, which is not loaded again."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY

from attention.errors import Failure, Interrupted, Refusal
from convert import heal
from convert.healing import cache, models
from convert.healing.cache import TeacherCache

SIZES: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "lr": 3e-3, "device": "cpu", "top_k": 8}
Make = Callable[..., Path]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are loaded, each with those that are in memory then."""
    found: list[str] = []
    now: list[str] = []
    load = models.load

    @contextlib.contextmanager
    def noting(source: Any, *how: str) -> Iterator[Any]:
        now.append(source.name)
        found.append(" beside ".join(reversed(now)))
        with load(source, *how) as model:
            yield model
        now.remove(source.name)

    monkeypatch.setattr(models, "load", noting)
    return found


def test_it_gives_what_the_teacher_gives(converted: Path, text: Path, tmp_path: Path, loads: list[str]) -> None:
    running = heal(converted, tmp_path / "running", text=text, **SIZES)
    assert loads == ["source", "mqa beside source"]
    loads.clear()
    for name in ("kept", "again"):
        found = heal(converted, tmp_path / name, text=text, teacher_cache=tmp_path / "cache", **SIZES)
        assert found.curve == running.curve
    assert loads == ["source", "mqa", "mqa"]
    before = len(list(tmp_path.glob("cache/*/*.safetensors")))
    heal(
        converted, tmp_path / "other", text=text, teacher_cache=tmp_path / "cache", **(SIZES | {"seed": 1})
    )  # sees other blocks
    assert loads[3:] == ["source", "mqa"]
    assert len(list(tmp_path.glob("cache/*/*.safetensors"))) > before
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("running", "kept", "again")]
    for name, tensor in weights[0].items():
        assert all(torch.equal(tensor, found[name]) for found in weights[1:]), name


def test_a_filling_that_was_stopped_goes_on(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heal(converted, tmp_path / "whole", text=text, **SIZES)
    add, asked = TeacherCache.add, []

    def stopping(cache: TeacherCache, teacher: Any, text: Any, indices: list[int], *rest: Any) -> None:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(indices)
        add(cache, teacher, text, indices, *rest)

    options = {**SIZES, "teacher_cache": tmp_path / "cache", "micro_batch_tokens": 64}
    monkeypatch.setattr(TeacherCache, "add", stopping)
    with pytest.raises(Interrupted):
        heal(converted, tmp_path / "out", text=text, **options)
    monkeypatch.setattr(TeacherCache, "add", lambda *given: asked.append(given[3]) or add(*given))
    resumed = heal(converted, tmp_path / "out", text=text, resume=True, **options)
    indices = [index for some in asked for index in some]
    assert len(indices) == len(set(indices))  # none was asked for twice
    assert resumed.curve == whole.curve


def test_another_cache_is_named(converted: Path, text: Path, tmp_path: Path) -> None:
    heal(converted, tmp_path / "one", text=text, teacher_cache=tmp_path / "cache", **SIZES)
    with pytest.raises(Refusal, match="was made with another top-k"):
        heal(converted, tmp_path / "two", text=text, teacher_cache=tmp_path / "cache", **(SIZES | {"top_k": 4}))
    (tmp_path / "other.txt").write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    with pytest.raises(Refusal, match="was made with another text"):
        heal(converted, tmp_path / "two", text=tmp_path / "other.txt", teacher_cache=tmp_path / "cache", **SIZES)
    with pytest.raises(Refusal, match="is not a teacher cache"):
        heal(converted, tmp_path / "two", text=text, teacher_cache=Path(__file__).parent, **SIZES)
    with pytest.raises(Refusal, match=f"largest probabilities, not all {VOCABULARY} of each token"):
        heal(converted, tmp_path / "two", text=text, teacher_cache=tmp_path / "c", **(SIZES | {"top_k": None}), dry_run=True)
    for place in (tmp_path / "two" / "said", tmp_path, tmp_path / "source", tmp_path / "two.partial"):
        with pytest.raises(Refusal, match="overlaps"):
            heal(converted, tmp_path / "two", text=text, teacher_cache=place, **SIZES, dry_run=True)
    assert not (tmp_path / "two").exists()


def edited(change: Callable[[dict[str, torch.Tensor]], None], keep_header: bool = True) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        found = load_file(file)
        change(found)
        with safe_open(file, "pt") as opened:
            header = opened.metadata()
        save_file(found, file, header if keep_header else None)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "token ids out of range": edited(lambda said: said["tokens"].add_(10**6)),
    "fewer tokens": edited(lambda said: said.update({name: part[:1].clone() for name, part in said.items()})),
    "larger log-probabilities": edited(lambda said: said["log_probabilities"].add_(5)),
    "the same, by another program": edited(lambda said: said["log_probabilities"].add_(5), keep_header=False),
    "another block": lambda file: file.write_bytes(min(file.parent.iterdir()).read_bytes()),
}


def test_a_damaged_block_is_named(converted: Path, text: Path, tmp_path: Path) -> None:
    where = tmp_path / "cache"
    heal(converted, tmp_path / "one", text=text, teacher_cache=where, **SIZES)
    shutil.copytree(where, tmp_path / "kept")
    for damage, damaged in DAMAGES.items():
        files = list(where.glob("*/*.safetensors"))
        for file in files[1:]:  # held-out blocks stay, if they are the first
            damaged(file)
        for more in ({"tokens": 12800}, {"lr": "auto", "tokens": 9600}):  # also while rates are tried
            with pytest.raises(Failure, match="is damaged") as error:
                heal(converted, tmp_path / "two", text=text, teacher_cache=where, **(SIZES | more))
            assert any(str(file) in str(error.value) for file in files), damage
        shutil.rmtree(where)
        shutil.copytree(tmp_path / "kept", where)


def test_a_disk_that_is_too_small_is_named_first(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heal(converted, tmp_path / "one", text=text, teacher_cache=tmp_path / "cache", **(SIZES | {"tokens": 64}))
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**4 if path.name == "cache" else 10**9))
    with pytest.raises(Failure, match="what the teacher says takes 0"):
        heal(converted, tmp_path / "two", text=text, teacher_cache=tmp_path / "cache", **(SIZES | {"tokens": 12800}))
