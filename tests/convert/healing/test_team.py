"""Healing by two processes: the curve and the weights of one process that takes the same steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from forked import Done, run_team
from safetensors.torch import load_file
from written import constants_stay, weights

from attention.errors import Refusal
from convert import Healing, heal
from convert.healing import team
from convert.healing.team import join, shards

OPTIONS: dict[str, Any] = {"tokens": 640, "context": 16, "batch_tokens": 64, "device": "cpu"}
SCRIPTS = {"ddp": "stopping.py", "fsdp": "fsdp_on_cpu.py"}
PLAN: Any = SimpleNamespace(device="cpu")


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
def test_two_processes_are_one_with_the_same_batch(converted: Path, text: Path, tmp_path: Path) -> None:
    """One writes a part of the text, and LoRA trains."""
    given: tuple[Any, ...] = ("--lr", "2e-4", "--train", "lora")
    given += ("--text", text, "--text", "self")
    launched = launch("ddp", converted, tmp_path / "two", *given)
    assert launched.stderr.count("info: step 10:") == 1
    one = heal(converted, tmp_path / "one", text=[text, "self"], lr=2e-4, train="lora", **OPTIONS)
    assert_same(launched, tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.launch
def test_sharded_processes_are_one_with_the_same_batch(results: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """All weights train, at a rate of three: a tied head, a latent with constants, padding. Stopped, it goes on under DDP."""
    path = results("padded")
    given = ("--text", text, "--train", "all", "--checkpointing", "--micro-batch-tokens", 16)  # steps in two parts
    given += ("--tokens", 9600)  # enough to try rates
    stopped = launch("fsdp", path, tmp_path / "two", *given, STOP_AT="20")  # behind the trials
    assert stopped.returncode != 0
    assert "with --resume finishes the healing" in stopped.stderr
    resumed = launch("ddp", path, tmp_path / "two", *given, "--resume")
    assert "info: step 15:" not in resumed.stderr
    one = heal(path, tmp_path / "one", text=text, train="all", checkpointing=True, **(OPTIONS | {"tokens": 9600}))
    assert_same(resumed, tmp_path / "two", one)
    tried = json.loads(resumed.stdout)["conversion"]["healing"]["rates_tried"]
    assert tried == pytest.approx(one.provenance["healing"]["rates_tried"], rel=1e-3)
    constants_stay(weights(path), weights(tmp_path / "two"))


def test_documented_configs_launch_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_launches_that_were_not_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(Refusal, match="healing does not support FSDP 1"):
        join(PLAN)
    monkeypatch.setenv("FSDP_VERSION", "2")
    for setting, says in team._UNTRIED.items():
        monkeypatch.setenv(setting, "true")
        with pytest.raises(Refusal, match=f"healing does not support {says[0]}"):
            join(PLAN)
        monkeypatch.delenv(setting)


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
