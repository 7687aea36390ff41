"""Healing by two processes: the curve and the weights of one process that takes the same steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Done, run_team
from safetensors.torch import load_file, save_file

from attention.errors import Refusal
from convert import Healing, heal, mla, mqa
from convert.healing.team import fsdp_plugin
from convert.healing.training import NotFinite
from convert.healing.zero import ZeroTrainer, zero_plugin

OPTIONS: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "device": "cpu"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "ddp": ("stopping.py", {}),
    "fsdp": ("fsdp_on_cpu.py", {}),
    "zero 1": ("zero_shared.py", ZERO),
    "zero 2": ("zero_shared.py", ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
}
INSTALLED = find_spec("deepspeed") is not None
zero = pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed")
Make = Callable[..., Path]


def launch(kind: str, converted: Path, output: Path, *options: Any, **environment: str) -> Done:
    """Heal with two processes."""
    script, settings = KINDS[kind]
    given = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = "heal", converted, output, *given, *options, "--json"
    return run_team(Path(__file__).with_name(script), *command, **settings, **environment)


def assert_same(launched: Done, two: Path, one: Healing) -> None:
    """The curve and the weights are those of one process, but for the order of sums."""
    assert launched.returncode == 0, launched.stderr
    curve = json.loads(launched.stdout)["conversion"]["healing"]["curve"]  # one process reports
    assert [point["kl"] for point in curve] == pytest.approx([point["kl"] for point in one.curve], rel=1e-3)
    found, wanted = (load_file(path / "model.safetensors") for path in (two, two.with_name("one")))
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=3e-4, msg=name)


@pytest.mark.launch
@pytest.mark.parametrize("kind", ["ddp", pytest.param("zero 2", marks=zero)])
def test_two_processes_are_one_with_the_same_batch(kind: str, checkpoint: Make, text: Path, tmp_path: Path) -> None:
    """One writes a part of the text, both fill the teacher's cache, and LoRA trains."""
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    given: tuple[Any, ...] = ("--lr", "3e-3", "--train", "lora", "--top-k", 16)
    given += ("--text", text, "--text", "self", "--text-shares", "3,1", "--teacher-cache", tmp_path / "said")
    launched = launch(kind, tmp_path / "mqa", tmp_path / "two", *given)
    assert launched.stderr.count("info: step 20:") == 1
    one = heal(tmp_path / "mqa", tmp_path / "one", text={text: 3, "self": 1}, lr=3e-3, train="lora", top_k=16, **OPTIONS)
    assert_same(launched, tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "then"),
    [("fsdp", "fsdp"), pytest.param("zero 1", "zero 2", marks=zero), pytest.param("zero 2", "fsdp", marks=zero)],
)
def test_sharded_processes_are_one_with_the_same_batch(
    kind: str, then: str, checkpoint: Make, text: Path, tmp_path: Path
) -> None:
    """All weights train, at a rate of three: a tied head, a latent with constants and padding. It is stopped and resumed."""
    source = checkpoint("llama", tie_word_embeddings=True)
    mla(source, tmp_path / "mla", kv_lora_rank=80, qk_rope_head_dim=8, pad_rank=True, method="svd")
    before = load_file(tmp_path / "mla" / "model.safetensors")
    for name in (name for name in before if name.endswith("o_proj.weight")):
        before[name] *= 1.3  # something to heal
    save_file(before, tmp_path / "mla" / "model.safetensors")
    given = ("--text", text, "--train", "all", "--checkpointing", "--micro-batch-tokens", 16)  # steps in two parts
    given += ("--tokens", 9600)  # enough to try rates
    stopped = launch(kind, tmp_path / "mla", tmp_path / "two", *given, STOP_AT="20")  # behind the trials
    assert stopped.returncode != 0
    assert "--resume goes on from the last state" in stopped.stderr
    resumed = launch(then, tmp_path / "mla", tmp_path / "two", *given, "--resume")
    assert "info: step 15:" not in resumed.stderr
    one = heal(tmp_path / "mla", tmp_path / "one", text=text, train="all", checkpointing=True, **(OPTIONS | {"tokens": 9600}))
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
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    page = (Path(__file__).parents[3] / "docs/healing.md").read_text(encoding="utf-8")
    found = []
    for config in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
        given = ["--config_file", str(tmp_path / "config.yaml"), "--no_python", "convert", "heal"]
        read, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(given))
        read.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        settings = prepare_deepspeed_cmd_env(read)[1] if read.use_deepspeed else prepare_multi_gpu_env(read)
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            plugin = fsdp_plugin()
            if read.use_deepspeed:  # nothing else is wrong
                with pytest.raises(Refusal, match="no launcher started" if INSTALLED else "DeepSpeed is not installed"):
                    zero_plugin(bfloat16=False)
        kind = plugin and (plugin.fsdp_version, plugin.cpu_ram_efficient_loading)
        if read.use_deepspeed:
            kind = f"ZeRO {settings['ACCELERATE_DEEPSPEED_ZERO_STAGE']}"
        found.append((kind, read.num_processes, read.num_machines))
    assert found == [((2, False), 8, 1), ("ZeRO 2", 8, 1), ((2, False), 16, 2), (None, 1, 1)]


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


def test_what_was_not_tried_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zero_plugin(bfloat16=False) is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for setting, value, error in (
        ("CONFIG_FILE", "zero.json", "healing makes DeepSpeed's config itself"),
        ("ZERO_STAGE", "3", "healing does not support ZeRO 3"),
        ("OFFLOAD_OPTIMIZER_DEVICE", "cpu", "healing does not support offload_optimizer_device cpu"),
        ("OFFLOAD_PARAM_DEVICE", "nvme", "healing does not support offload_param_device nvme"),
        ("GRADIENT_CLIPPING", "0.5", "healing does not support gradient_clipping 0.5"),
        ("GRADIENT_ACCUMULATION_STEPS", "4", "healing does not support gradient_accumulation_steps 4"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_{'' if setting.startswith('GRADIENT') else 'DEEPSPEED_'}{setting}", value)
            with pytest.raises(Refusal, match=error):
                zero_plugin(bfloat16=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(Refusal, match="no launcher started" if INSTALLED else "DeepSpeed is not installed"):
        zero_plugin(bfloat16=False)


def test_steps_that_deepspeed_leaves_out_are_errors() -> None:
    trainer = object.__new__(ZeroTrainer)
    trainer._zero = SimpleNamespace(overflow=False)
    trainer._update(3)
    trainer._zero.overflow = True
    with pytest.raises(NotFinite, match="gradients are not finite at step 4"):
        trainer._update(3)
