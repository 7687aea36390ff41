"""Healing by two processes: the curve and the weights of one process that takes the same steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Done, run_team
from safetensors.torch import load_file, save_file

from attention.errors import Refusal
from convert import Healing, heal, mla, mqa
from convert.healing import models, team
from convert.healing.team import join, shards

OPTIONS: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "device": "cpu"}
SCRIPTS = {"ddp": "stopping.py", "fsdp": "fsdp_on_cpu.py"}
PLAN: Any = SimpleNamespace(device="cpu")
Make = Callable[..., Path]


def launch(kind: str, converted: Path, output: Path, *options: Any, **environment: str) -> Done:
    """Heal with two processes."""
    given = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = "heal", converted, output, *given, *options, "--json"
    return run_team(Path(__file__).with_name(SCRIPTS[kind]), *command, **environment)


def assert_same(launched: Done, two: Path, one: Healing) -> None:
    """The curve and the weights are those of one process, but for the order of sums."""
    assert launched.returncode == 0, launched.stderr
    provenance = json.loads(launched.stdout)["conversion"]  # one process reports
    returned = [json.loads(line) for line in re.findall("^returned: (.*)", launched.stderr, re.MULTILINE)]
    assert returned == [provenance, provenance], "also by the one that only trains"
    curve = provenance["healing"]["curve"]
    assert [point["kl"] for point in curve] == pytest.approx([point["kl"] for point in one.curve], rel=1e-3)
    found, wanted = (load_file(path / "model.safetensors") for path in (two, two.with_name("one")))
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=3e-4, msg=name)


@pytest.mark.launch
def test_two_processes_are_one_with_the_same_batch(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """One writes a part of the text, and LoRA trains."""
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    given: tuple[Any, ...] = ("--lr", "3e-3", "--train", "lora")
    given += ("--text", text, "--text", "self", "--text-shares", "3,1")
    launched = launch("ddp", tmp_path / "mqa", tmp_path / "two", *given)
    assert launched.stderr.count("info: step 20:") == 1
    one = heal(tmp_path / "mqa", tmp_path / "one", text={text: 3, "self": 1}, lr=3e-3, train="lora", **OPTIONS)
    assert_same(launched, tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.launch
def test_sharded_processes_are_one_with_the_same_batch(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """All weights train, at a rate of three: a tied head, a latent with constants, padding. Stopped, it goes on under DDP."""
    source = checkpoint("llama", tie_word_embeddings=True)
    mla(source, tmp_path / "mla", kv_lora_rank=80, qk_rope_head_dim=8, pad_rank=True, method="svd")
    before = load_file(tmp_path / "mla" / "model.safetensors")
    for name in (name for name in before if name.endswith("o_proj.weight")):
        before[name] *= 1.3  # something to heal
    save_file(before, tmp_path / "mla" / "model.safetensors")
    given = ("--text", text, "--train", "all", "--checkpointing", "--micro-batch-tokens", 16)  # steps in two parts
    given += ("--tokens", 9600)  # enough to try rates
    stopped = launch("fsdp", tmp_path / "mla", tmp_path / "two", *given, STOP_AT="20")  # behind the trials
    assert stopped.returncode != 0
    assert "with --resume finishes the healing" in stopped.stderr
    resumed = launch("ddp", tmp_path / "mla", tmp_path / "two", *given, "--resume")
    assert "info: step 15:" not in resumed.stderr
    one = heal(tmp_path / "mla", tmp_path / "one", text=text, train="all", checkpointing=True, **(OPTIONS | {"tokens": 9600}))
    assert_same(resumed, tmp_path / "two", one)
    tried = json.loads(resumed.stdout)["conversion"]["healing"]["rates_tried"]
    assert tried == pytest.approx(one.provenance["healing"]["rates_tried"], rel=1e-3)
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
    (one,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    two = one.replace(
        "num_machines: 1", "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500"
    )
    for config in (one, two.replace("num_processes: 8", "num_processes: 16")):
        (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
        given = ["--config_file", str(tmp_path / "config.yaml"), "--no_python", "convert", "heal"]
        read, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
        with monkeypatch.context() as patch:
            for name, value in prepare_multi_gpu_env(read).items():
                patch.setenv(name, value)
            join(PLAN)
            found.append((shards(), read.num_processes, read.num_machines))
    assert found == [(True, 8, 1), (True, 16, 2)]


def test_what_was_not_tried_of_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(Refusal, match="healing does not support FSDP 1"):
        join(PLAN)
    monkeypatch.setenv("FSDP_VERSION", "2")
    for setting in ("fsdp_activation_checkpointing", "fsdp_offload_params"):
        monkeypatch.setenv(setting.upper(), "true")
        with pytest.raises(Refusal, match=f"healing does not support {setting}"):
            join(PLAN)
        monkeypatch.delenv(setting.upper())


def test_deepspeed_is_refused(checkpoint: Make, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(Refusal, match="healing does not support DeepSpeed"):
        heal(tmp_path / "mqa", tmp_path / "out", text=text, **OPTIONS)


@pytest.mark.parametrize(
    ("width", "multiplies", "expected"),
    [
        (512, torch.bfloat16, torch.bfloat16),
        (511, torch.bfloat16, torch.float32),  # casts would take longer than they save
        (512, torch.float32, torch.float32),
    ],
)
def test_cpus_compute_in_bfloat16_where_it_is_faster(
    width: int, multiplies: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "rough", lambda device: multiplies)
    plan: Any = SimpleNamespace(device="cpu", converted=SimpleNamespace(decoder=SimpleNamespace(hidden_size=width)))
    assert team.computes_in(plan) is expected


def test_passes_in_bfloat16_heal_as_those_in_fp32_do(
    checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    curves = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(models, "computes_in", lambda plan, dtype=dtype: dtype)
        found = heal(tmp_path / "mqa", tmp_path / str(dtype), text=text, lr=1e-3, **OPTIONS)
        curves.append([point["kl"] for point in found.curve])
        assert {weight.dtype for weight in load_file(tmp_path / str(dtype) / "model.safetensors").values()} == {torch.float32}
    assert curves[0] != curves[1]  # or it was not used
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[1][-1] < curves[1][0]
