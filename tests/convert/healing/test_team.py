"""Healing by two processes: the curve and the weights of one process that takes the same steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.errors import Refusal
from convert import Healing, heal, mla, mqa
from convert.healing.team import fsdp_plugin

OPTIONS: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "device": "cpu"}
KINDS = {"ddp": ["-m", "convert.cli"], "fsdp": [Path(__file__).with_name("fsdp_on_cpu.py")]}
Make = Callable[..., Path]


def launch(
    kind: str, converted: Path, output: Path, *options: Any, stop_at: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Heal with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *KINDS[kind]]
    given = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    return subprocess.run(
        [str(part) for part in (*command, "heal", converted, output, *given, *options, "--json")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | ({} if stop_at is None else {"STOP_AT": str(stop_at)}),
    )


def assert_same(launched: subprocess.CompletedProcess[str], two: Path, one: Healing) -> None:
    """The curve and the weights are those of one process, but for the order of sums."""
    assert launched.returncode == 0, launched.stderr
    curve = json.loads(launched.stdout)["conversion"]["healing"]["curve"]  # one process reports
    assert [point["kl"] for point in curve] == pytest.approx([point["kl"] for point in one.curve], rel=1e-3)
    found, wanted = (load_file(path / "model.safetensors") for path in (two, two.with_name("one")))
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=3e-4, msg=name)


def test_two_processes_are_one_with_the_same_batch(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """Both fill the teacher's cache, and LoRA trains."""
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    given = ("--lr", "3e-3", "--train", "lora", "--top-k", 16)
    launched = launch("ddp", tmp_path / "mqa", tmp_path / "two", "--text", text, *given, "--teacher-cache", tmp_path / "said")
    assert launched.stderr.count("info: step 20:") == 1
    one = heal(tmp_path / "mqa", tmp_path / "one", text=text, lr=3e-3, train="lora", top_k=16, **OPTIONS)
    assert_same(launched, tmp_path / "two", one)


def test_sharded_processes_are_one_with_the_same_batch(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """All weights train, at a rate of three: a tied head, a latent with constants and padding. It is stopped and resumed."""
    source = checkpoint("llama", tie_word_embeddings=True)
    mla(source, tmp_path / "mla", kv_lora_rank=80, qk_rope_head_dim=8, pad_rank=True, method="svd")
    before = load_file(tmp_path / "mla" / "model.safetensors")
    for name in (name for name in before if name.endswith("o_proj.weight")):
        before[name] *= 1.3  # something to heal
    save_file(before, tmp_path / "mla" / "model.safetensors")
    given = ("--text", text, "--train", "all", "--checkpointing")
    stopped = launch("fsdp", tmp_path / "mla", tmp_path / "two", *given, stop_at=12)  # behind the trials
    assert stopped.returncode != 0
    assert "--resume goes on from the last state" in stopped.stderr
    resumed = launch("fsdp", tmp_path / "mla", tmp_path / "two", *given, "--resume")
    assert "info: step 2:" not in resumed.stderr
    one = heal(tmp_path / "mla", tmp_path / "one", text=text, train="all", checkpointing=True, **OPTIONS)
    assert_same(resumed, tmp_path / "two", one)
    tried = json.loads(resumed.stdout)["conversion"]["healing"]["rates_tried"]
    assert one.record is not None
    assert tried == pytest.approx(one.record["healing"]["rates_tried"], rel=1e-3)
    after = load_file(tmp_path / "two" / "model.safetensors")
    for name, gain in ((name, weight) for name, weight in before.items() if name.endswith("kv_a_layernorm.weight")):
        down, bias = (name.replace("kv_a_layernorm.weight", f"kv_a_proj_with_mqa.{part}") for part in ("weight", "bias"))
        assert torch.equal(after[name], gain)
        assert torch.equal(after[bias][: len(gain)], before[bias][: len(gain)])
        assert not after[down][: len(gain)][gain == 0].any()


def test_documented_configs_launch_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    page = (Path(__file__).parents[3] / "docs/healing.md").read_text(encoding="utf-8")
    found = []
    for config in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
        given = ["--config_file", str(tmp_path / "config.yaml"), "--no_python", "convert", "heal"]
        read, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
        with monkeypatch.context() as patch:
            for name, value in prepare_multi_gpu_env(read).items():
                patch.setenv(name, value)
            plugin = fsdp_plugin()
        found.append(
            (plugin and (plugin.fsdp_version, plugin.cpu_ram_efficient_loading), read.num_processes, read.num_machines)
        )
    assert found == [((2, False), 8, 1), ((2, False), 16, 2), (None, 1, 1)]


def test_what_was_not_tried_of_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(Refusal, match="healing does not support FSDP 1"):
        fsdp_plugin()
    monkeypatch.setenv("FSDP_VERSION", "2")
    for setting in ("fsdp_activation_checkpointing", "fsdp_offload_params"):
        monkeypatch.setenv(setting.upper(), "true")
        with pytest.raises(Refusal, match=f"healing does not support {setting}"):
            fsdp_plugin()
        monkeypatch.delenv(setting.upper())


def test_deepspeed_is_refused(converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(Refusal, match="healing does not support DeepSpeed"):
        heal(converted, tmp_path / "out", text=text, **OPTIONS)
