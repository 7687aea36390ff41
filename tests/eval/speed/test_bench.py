"""Speed side by side: what a step is, what is counted, what is refused. Times are those of a clock that the tests set."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_config, tiny_model
from tiny_mla import error, mla_model
from written import Make, raising

from attention import absorb
from attention.errors import Failure, Refusal
from attention.spec import AttentionSpec
from eval.inputs.source import Source
from eval.machine import device
from eval.machine.device import free_memory, memory_for, trim_memory, whole_memory
from eval.speed import bench
from eval.speed.bench import BenchSettings, check, run, to_markdown
from eval.speed.workload import Workload

CPU = torch.device("cpu")
SHORT = BenchSettings(contexts=(16,), steps=2, rounds=3, device="cpu")


@pytest.fixture
def pair(checkpoint: Make, tmp_path: Path) -> list[Source]:
    """An MHA source and an MLA model of the same layers: 3 × 2 × 8 heads × 8, and 3 × (16 + 8) values per token."""
    mla_model().save_pretrained(tmp_path / "latent")
    return [Source.parse(str(checkpoint(num_key_value_heads=8))), Source.parse(str(tmp_path / "latent"))]


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(work: Workload) -> Workload:
    work.to_start()
    work.prefill()
    return work


def test_only_the_work_is_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [100.0], list[str]()

    def spend(what: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            log.append(what)
            now[0] += seconds

        return work

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    assert device.timed(CPU, spend("work", 0.25), spend("before", 8.0), 3) == [0.25, 0.25, 0.25]
    assert log == ["before", "work"] * 3


def test_a_gpu_times_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("mark")

        def elapsed_time(self, end: Event) -> float:
            assert log[-1] == "wait"  # before that the events may not have happened
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    work, before = (lambda what=what: log.append(what) for what in ("work", "before"))
    assert device.timed(torch.device("cuda"), work, before, 2) == [0.25, 0.25]
    assert log == ["wait", *["before", "mark", "work", "mark"] * 2, "wait"]


def test_the_machine_is_named_and_its_memory_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = device.hardware(CPU)
    assert machine["name"]
    assert (machine["threads"], machine["torch"]) == (torch.get_num_threads(), torch.__version__)
    assert 2**20 < free_memory(CPU) < whole_memory(CPU)
    asked = list[int]()
    for library in (SimpleNamespace(malloc_trim=asked.append), SimpleNamespace()):
        monkeypatch.setattr("ctypes.CDLL", lambda name, library=library: library)
        trim_memory()
    assert asked == [0], "where the C library trims"


def test_the_peak_is_of_what_a_prefill_and_a_step_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: log.append("read") or 410)
    works = {name: lambda name=name: log.append(name) for name in ("to_start", "to_last", "prefill", "step")}
    work: Any = SimpleNamespace(ids=SimpleNamespace(device=torch.device("cuda")), **works)
    assert bench._peak(work) == 410
    measured = ["reset_peak_memory_stats", "prefill", "to_last", "step", "synchronize", "read"]
    assert log == ["to_start", "synchronize", *measured]


LONG = "windows longer than the context"
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model(tiny_config("llama")),
    "mla stock": mla_model,
    "mla absorbed": lambda: absorb(mla_model(), when="always"),
    LONG: lambda: tiny_model(tiny_config("mistral", sliding_window=64)),
}


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(("name", "chunk"), [("llama", 7), ("mla stock", 20), ("mla absorbed", 7), (LONG, 20)])
def test_every_step_reads_the_last_token_over_all_others(name: str, chunk: int) -> None:
    model = MODELS[name]()
    work = Workload(model, 3, 20)
    work.chunk = chunk
    expected = model(work.ids).logits[:, -1:]
    for _ in range(2):  # a second prefill begins anew
        work.to_start()
        work.prefill()
        for _ in range(3):
            work.to_last()
            found = work.step()
            assert found.shape == (3, 1, VOCABULARY)
            assert error(found, expected) < 1e-5
            assert [int(layer.cumulative_length) for layer in work.cache.layers] == [20, 20, 20]


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    ("make", "per_token", "tokens"),
    [
        (lambda: tiny_model(tiny_config("llama", num_key_value_heads=8)), 3 * 2 * 8 * 8 * 4, 20),
        (lambda: tiny_model(tiny_config("llama", num_key_value_heads=2)), 3 * 2 * 2 * 8 * 4, 20),
        (mla_model, 3 * (16 + 8) * 4, 20),
        (lambda: tiny_model(tiny_config("mistral", sliding_window=8)), 3 * 2 * 4 * 8 * 4, 8),
    ],
    ids=["mha", "gqa", "mla", "window"],
)
def test_the_cache_holds_what_the_config_predicts(make: Callable[[], Any], per_token: int, tokens: int) -> None:
    work = filled(Workload(make(), 2, 20))
    spec = AttentionSpec.from_config(work.model.config)
    assert work.cache_bytes == 2 * spec.cache_bytes("float32", 20, static=True) == 2 * tokens * per_token
    work.check_cache("it", spec, "float32")
    with pytest.raises(Failure, match=f"live cache of it holds {work.cache_bytes} bytes, its config predicts"):
        work.check_cache("it", spec, "bfloat16")


def test_what_keeps_more_than_keys_and_values_is_not_measured() -> None:
    model = tiny_model(tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"]))
    with pytest.raises(Failure, match="Lfm2ForCausalLM keeps more than keys and values: LinearAttentionLayer"):
        Workload(model, 1, 8)


@pytest.mark.usefixtures("no_grad")
def test_logits_that_are_no_numbers_are_no_speed() -> None:
    work = Workload(mla_model(dtype=torch.float16, size=2.0**20), 1, 8)  # the constant of the latent norm overflows
    filled(work)
    with pytest.raises(Failure, match=r"logits of it \(DeepseekV3ForCausalLM\) are not finite in float16"):
        work.check_logits("it", "float16")
    work = Workload(mla_model(dtype=torch.float16), 1, 8)
    filled(work)
    work.check_logits("it", "float16")


@pytest.mark.parametrize(
    ("kind", "said", "lacking"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 7 GiB", True),
        (torch.AcceleratorError, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (RuntimeError, "Triton Error [CUDA]: out of memory", True),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory", True),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered", False),
        (RuntimeError, "Triton Error [CUDA]: invalid argument", False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(kind: type[RuntimeError], said: str, lacking: bool) -> None:
    with pytest.raises(Failure if lacking else kind), memory_for("it", "free some"):
        raise kind(said)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_gone_when_its_memory_is_given_back(
    fails: bool, pair: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, order = list[Any](), list[str]()

    def measure(run: Any, model: Any, *rest: Any) -> dict[str, Any]:
        alive.append(weakref.ref(model))
        order.append("measured")
        if fails:
            raise ValueError
        return {"batch": 1, "context": 1}

    def give_back() -> None:
        order.append("memory")
        if not fails:  # else the error holds it
            alive[:] = [model() for model in alive]

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    with contextlib.suppress(ValueError):
        run(pair[:1], SHORT)
    assert order == ["measured", "memory"]
    assert fails or alive == [None]


class FakeClock:
    """In place of `timed`: seconds by model type and kind of work, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: Sequence[float]) -> None:
        self.seconds = {key: itertools.cycle(values) for key, values in seconds.items()}
        monkeypatch.setattr(bench, "timed", self)

    def __call__(self, device: torch.device, work: Any, before: Any, times: int) -> list[float]:
        before()
        work()
        if work.__name__ == "step" and times != SHORT.steps:
            return [77.0] * times  # warming up
        return [next(self.seconds[f"{work.__self__.model.config.model_type}_{work.__name__}"]) for _ in range(times)]


def test_every_figure_follows_from_times_and_bytes(pair: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0.5, 1.5, 3.0, 5.0, 2.0, 2.0]  # rounds of two: 1, 4 and 2 seconds
    FakeClock(monkeypatch, llama_prefill=[8.0, 2.0, 4.0], llama_step=steps, deepseek_v3_prefill=[1.0], deepseek_v3_step=[0.25])
    report = run(pair, replace(SHORT, batches=(3,)))
    (source,), (latent,) = (entry["cases"] for entry in report["models"])
    assert source["prefill_seconds"] == {"median": 4.0, "min": 2.0, "max": 8.0, "rounds": [8.0, 2.0, 4.0]}
    assert source["step_seconds"] == {"median": 2.0, "min": 1.0, "max": 4.0, "rounds": [1.0, 4.0, 2.0]}
    # 3 layers × key and value × 8 heads × 8 dims × 4 bytes; 3 × (16 + 8) × 4
    assert (source["cache_bytes"], latent["cache_bytes"]) == (3 * 16 * 1536, 3 * 16 * 288)
    header, _, *rows = [line.split("|") for line in to_markdown(report).splitlines()[:4]]
    named = ["batch", "context", "model", "attention", "runtime", "prefill, ms", "step, ms", "cache"]
    assert [cell.strip() for cell in header[1:-1]] == named
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["3", "16", "source", "MHA", "transformers", "4,000 (2,000 to 8,000)", "2,000 (1,000 to 4,000)", "73.7 kB"],
        ["3", "16", "latent", "MLA-16+8", "absorbed, torch", "1,000 (1,000 to 1,000)", "250 (250 to 250)", "13.8 kB"],
    ]


def test_the_report_keeps_its_contract(pair: list[Source], checkpoint: Make) -> None:
    grouped = Source.parse(str(checkpoint(name="grouped", num_key_value_heads=2)))
    settings = replace(SHORT, batches=(2, 1), contexts=(16, 8), rounds=2, steps=1, stock=True)
    report = run([*pair, grouped], settings)
    assert set(report) == {"kvfold", "setup", "models"}
    assert report["setup"] | {"rounds": 2, "steps": 1} == report["setup"]
    runtimes = [("MHA", "transformers")]
    runtimes += [("MLA-16+8", "absorbed"), ("MLA-16+8", "transformers"), ("GQA-2", "packed"), ("GQA-2", "transformers")]
    assert [(entry["kind"], entry["runtime"]) for entry in report["models"]] == runtimes
    for entry in report["models"]:
        assert [(row["batch"], row["context"]) for row in entry["cases"]] == [(1, 8), (1, 16), (2, 8), (2, 16)]
        for row in entry["cases"]:
            for seconds in (row["prefill_seconds"], row["step_seconds"]):
                assert seconds["min"] <= seconds["median"] <= seconds["max"]
                assert len(seconds["rounds"]) == 2
            assert row["prefill_chunk"] == row["context"]
            assert (row["backend"], row["backend_reason"]) == (None if entry["runtime"] == "transformers" else "torch", None)
            assert row["peak_bytes"] is None
    source = tiny_model(tiny_config("llama", num_key_value_heads=8))
    assert report["models"][0]["weight_bytes"] == sum(parameter.nbytes for parameter in source.parameters())


def test_what_cannot_be_packed_or_absorbed_runs_as_it_is(
    checkpoint: Make, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 8}
    model = tiny_model(tiny_config("deepseek_v2", q_lora_rank=None, first_k_dense_replace=3, n_routed_experts=2, **sizes))
    model.save_pretrained(tmp_path / "v2")
    report = run([Source.parse(str(checkpoint("gemma2"))), Source.parse(str(tmp_path / "v2"))], SHORT)
    assert [entry["runtime"] for entry in report["models"]] == ["transformers"] * 2
    said = "v2 runs as transformers has it: DeepseekV2ForCausalLM has no latent attention that can be absorbed"
    assert any(line.startswith(said) for line in warned())
    said = "source runs as transformers has it: cannot pack model.layers.0.self_attn of Gemma2ForCausalLM: it attends"
    assert any(line.startswith(said) for line in warned())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (8, 129)}, "a context of 129 tokens exceeds the 128 positions"),
        ({"contexts": (1,)}, r"contexts of \(1,\) cannot be measured: it must be at least 2"),
        ({"batches": (1, 0)}, r"batches of \(1, 0\) cannot be measured: it must be at least 1"),
        ({"steps": 0}, "steps of 0 cannot be measured"),
        ({"rounds": 0}, "rounds of 0 cannot be measured"),
        ({"device": "quantum"}, "no device 'quantum'"),
        ({"stock": True}, "none of these models has latent or grouped attention"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str, checkpoint: Make) -> None:
    source = checkpoint(num_key_value_heads=8)
    (source / "model.safetensors").write_bytes(b"no weights")  # and none are read
    with pytest.raises(Refusal, match=message):
        run([Source.parse(str(source))], replace(SHORT, **changes))


def test_the_context_defaults_to_the_smallest_limit(checkpoint: Make) -> None:
    sources = [Source.parse(str(checkpoint(name=str(n), max_position_embeddings=n))) for n in (64, 4096)]
    assert check(sources, replace(SHORT, contexts=()))[1] == [(1, 64)]
    assert check(sources[1:], replace(SHORT, contexts=()))[1] == [(1, 2048)]


def test_too_little_memory_is_seen_before_anything_is_loaded(pair: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = check(pair, SHORT)
    free = runs[0].weight_bytes + 5 * 16 * 1536
    monkeypatch.setattr(bench, "free_memory", lambda device: free)
    (pair[0].directory / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(Failure, match=r"source at batch 6 × context 16 takes .* of KV cache in float32; cpu has") as caught:
        run(pair, replace(SHORT, batches=(1, 6)))
    assert caught.value.hint == "use --batch 5 or less at this context"


def test_memory_that_runs_out_names_batch_and_context(pair: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more")
    monkeypatch.setattr(Workload, "step", raising(full))
    with pytest.raises(Failure, match=r"for source at batch 2 × context 16 in float32: CUDA out .* 7 GiB$") as caught:
        run(pair, replace(SHORT, batches=(2,)))
    assert "--batch" in str(caught.value.hint)


def test_the_table_shows_what_a_gpu_adds_and_every_warning(pair: list[Source]) -> None:
    report = run(pair, replace(SHORT, rounds=1, steps=1))
    for entry in report["models"]:
        (row,) = entry["cases"]
        row |= {"peak_bytes": 25 * 10**8, "prefill_chunk": 4, "backend": "torch", "backend_reason": "triton is too old"}
    report["models"][0].update(name="a|b\n<img>*c* `d` \x1b[31m\u202e_e_")
    text = to_markdown(report)
    assert text.count("2.5 GB") == 2
    assert "chunks of so many tokens: a\\|b " in text
    assert text.count("Warning: triton is too old.") == 1
    assert text.count(r"a\|b \<img\>\*c\* \`d\`  \[31m \_e\_") == 2, "a row and a line"
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_measured(pair: Sequence[Source]) -> None:
    report = run(pair, replace(SHORT, device="cuda", dtype="float32"))
    for entry in report["models"]:
        (row,) = entry["cases"]
        assert row["peak_bytes"] > entry["weight_bytes"] + row["cache_bytes"]
        assert row["step_seconds"]["min"] > 0
