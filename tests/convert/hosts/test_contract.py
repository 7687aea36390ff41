"""What every output class promises: each property over rows of sources, results made once and read by every test.

Tests of one class alone are in the file of that class. The cheap properties of families are proved for every row in
tests/convert/families/test_contract.py; here `make test` has a row of each way in which an output class holds a source.
"""

import json
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import held
import pytest
import torch
from alike import decodes_alike
from forked import run_without_kvfold
from held import IGNORING, NO_ROPE, PLAIN, Row, full, latent_of, said, small, stock
from latents import WAYS, method_options, same_logits, tolerance
from rows import rows
from tiny import tiny_config
from tiny_mla import tokens
from transformers import AutoModelForCausalLM
from written import Convert, Make, is_a_copy, ok, read

from attention import load
from attention.latent import is_absorbed
from attention.models import CODE, MODEL_TYPE
from attention.models.modeling_kvfold import KvfoldLatentAttention as Own
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family
from convert.hosts import Host
from convert.hosts.kvfold import HOST, LATENT_HOST
from convert.hosts.latent import DEEPSEEK
from convert.hosts.sharing import BIGCODE, PHI
from eval.inputs.source import Source
from eval.quality.lockstep import measured_bytes_per_token

Made = Callable[[Row, str], tuple[Path, Path]]


def bytes_planned(convert: Convert, command: str, source: Path, out: Path, options: Iterable[Any]) -> int:
    planned = json.loads(ok(convert(command, source, out, *options, "--dry-run", "--json")).stdout)
    return int(planned["kv_bytes_per_token_after"])


@pytest.fixture(scope="session")
def made(shelf: Make, convert: Convert, spoken: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Source and result of a row: `made(row, "svd")` at full size, `made(row, "small")`, `made(row, "heads")`; made once."""
    directory, found, numbers = tmp_path_factory.mktemp("contract"), dict[str, tuple[Path, Path]](), count()
    text = directory / "text.txt"
    text.write_text(spoken)

    def make(row: Row, what: str) -> tuple[Path, Path]:
        if (key := repr((row, what))) in found:
            return found[key]
        copies = {"duplicated": heads_of(row) // row.groups} if what == "heads" else {}
        source, out = shelf(row.model_type, **copies, **row.changes), directory / str(next(numbers))
        if what == "heads":
            options = (text if option == "TEXT" else option for option in row.options)
            ok(convert("gqa", source, out, "--groups", row.groups, *options, *row.layers))
        elif what == "small":
            ok(convert("mla", source, out, *small(row)))
        elif what == "bfloat16":
            ok(convert("mla", source, out, *full(source, row), "--method", "svd", "--dtype", "bfloat16"))
        else:
            ok(convert("mla", source, out, *full(source, row), *method_options(what, text)))
        return found.setdefault(key, (source, out))

    return make


SWITCHED = dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "qk_layernorm", "use_qk_norm"), True)
FIT = ("--class", "kvfold", "--text", "TEXT", "--heal", 0, "--calibration-tokens", 384, "--calibration-context", 48)


def heads_of(row: Row) -> int:
    return AttentionSpec.from_config(tiny_config(row.model_type, **row.changes)).num_kv_heads


DIVIDED = Row("gpt2", MODEL_TYPE, {"scale_attn_by_inverse_layer_idx": True}, kept=(1, 2))


def a_layer_kept(model_type: str) -> tuple[Family, AttentionSpec]:
    family = FAMILIES[model_type].of(tiny_config(model_type))
    spec = family.spec
    return family, spec.grouped(spec.num_kv_heads // 2).keeping((1,), spec.num_kv_heads)


def halved(model_type: str) -> Row:
    """Half as many heads as it has, in its own class if that can share them."""
    holds = "phi" if model_type in PHI.families else MODEL_TYPE if model_type in IGNORING else model_type
    return Row(model_type, holds, SWITCHED, heads_of(Row(model_type, holds, SWITCHED)) // 2)


# Of others, kvfold's grouped attention does not rotate as they do.
KEEPING = [name for name, of in FAMILIES.items() if of.has_heads and HOST.refuses(*a_layer_kept(name)) is None]
HEADS: dict[str, Row] = {
    **{name: halved(name) for name, family in FAMILIES.items() if family.has_heads},
    **{f"{name}, behind its norm": Row(name, MODEL_TYPE, changes, 4 if name == "mpt" else 2, FIT, 1e-3)
       for name, changes in held.BEHIND.items()},
    **{f"{name}, a layer kept": halved(name)._replace(holds=MODEL_TYPE, kept=(1,)) for name in KEEPING},
    "smollm3, a layer kept, another without RoPE": Row("smollm3", MODEL_TYPE, {"no_rope_layers": [1, 0, 1]}, 2, kept=(0,)),
    "gpt2, layers kept, logits divided by the layer": DIVIDED._replace(groups=2),
    "gemma2, a layer kept and a cap": Row("gemma2", MODEL_TYPE, {"attn_logit_softcapping": 0.5}, 2, kept=(0,)),
    # GPT-Neo's attention is in fp32.
    **{f"{case}, one head": Row(name, "gpt_bigcode", changes, 1, ("--method", "mean"), 1e-6 if name == "gpt_neo" else 1e-11)
       for case, (name, changes) in held.ONE.items()},
}  # fmt: skip
# One of each layout in its own class; those of other classes that differ in what these have to compute.
OWN = ("llama", "phi3", "qwen3_moe", "cohere")
OTHERS = [
    *("bloom", "codegen", "falcon", "gpt2", "gpt_neo"),
    *(f"{name}, behind its norm" for name in ("cohere", "mpt", "olmo2")),
    *(f"{name}, one head" for name in ("opt", "gpt_neo", "gpt2, logits divided by the layer")),
    *(f"{name}, a layer kept" for name in ("llama", "gpt_neox", "gpt2", "gemma3_text", "mpt")),
    "gemma2, a layer kept and a cap",
    "smollm3, a layer kept, another without RoPE",
    "gpt2, layers kept, logits divided by the layer",
]
# Of each class, with ALiBi, a clamp and a norm, RoPE of neighbours and of a share of dims, learned positions.
RUNNING = (
    "bloom", "codegen", "falcon", "cohere, behind its norm", "opt, one head",
    *(f"{name}, a layer kept" for name in ("llama", "gpt_neox", "gemma3_text")),
)  # fmt: skip
ELSEWHERE = [name for name, row in HEADS.items() if row.holds != row.model_type]


def exact_logits(path: Path, row: Row) -> torch.Tensor:
    """In fp64 by sdpa, as eager attention has its softmax in fp32; else in fp32."""
    ids = tokens(2, 24)
    if row.tolerance <= 1e-6:
        return said(stock(path, dtype=torch.float64), ids)
    return said(stock(path, dtype=torch.float32, attn_implementation="eager"), ids)


@pytest.mark.parametrize("name", rows(HEADS, [*OWN, *OTHERS]))
def test_equal_heads_merge_without_loss(name: str, made: Made) -> None:
    row = HEADS[name]
    source, out = made(row, "heads")
    config = read(out / "config.json")
    assert config["model_type"] == row.holds
    before, after = (AttentionSpec.from_config(Source.parse(str(path)).config) for path in (source, out))
    assert after == before.grouped(row.groups).keeping(row.kept, before.num_kv_heads)
    if row.holds == row.model_type and FAMILIES[row.model_type].shares_heads:
        assert (config["num_key_value_heads"], config["head_dim"]) == (row.groups, before.head_dim)
    same_logits(exact_logits(out, row), exact_logits(source, row), row.tolerance)


@pytest.mark.parametrize("name", rows(ELSEWHERE, RUNNING))
def test_fewer_heads_run_alike_in_every_way(name: str, made: Made, convert: Convert, tmp_path: Path) -> None:
    """In another class than the source's, with the cache that the plan says, and saved again."""
    row = HEADS[name]
    source, out = made(row, "heads")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    options = () if "TEXT" in row.options else row.options
    kind = ("--class", "kvfold") if "TEXT" in row.options else ()
    size = ("--groups", row.groups, *options, *kind, *row.layers)
    planned = bytes_planned(convert, "gqa", source, tmp_path / "out", size)
    if "sliding_window" not in row.changes:  # such layers forget
        assert measured_bytes_per_token(model, "float32") == planned
    ids = tokens(2, 20)
    assert model(ids).past_key_values.layers[-1].keys.shape[1] == row.groups
    decodes_alike(model, ids)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(said(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), ids), said(model, ids))


@pytest.mark.parametrize("model_type", rows([name for name, family in FAMILIES.items() if family.has_heads], ["llama", "gpt2"]))
def test_as_many_groups_as_heads_copies_every_bit(model_type: str, shelf: Make, convert: Convert, tmp_path: Path) -> None:
    source = shelf(model_type)
    heads = heads_of(Row(model_type, model_type))
    ok(convert("gqa", source, tmp_path / "out", "--groups", heads, "--method", "mean", "--force"))
    is_a_copy(tmp_path / "out", source)
    assert read(tmp_path / "out" / "config.json") == read(source / "config.json")


INSIDE = {"codegen": "phi", "gptj": "phi"}  # their own classes give RoPE to no other attention
ALWAYS_NORMALISED = ("apertus", "exaone4", "gemma3_text", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe")
AS_DEEPSEEK = PLAIN | {
    "seed_oss": {"attention_bias": False, "attention_out_bias": True},
    "phi3": {"rope_parameters": held.DEFAULT | {"partial_rotary_factor": 0.75}},
}
WITH_HEADS = [name for name in sorted(LATENT_HOST.families) if FAMILIES[name].has_heads]
LATENTS: dict[str, Row] = {
    **{case: latent_of(case) for case in WITH_HEADS},
    **{f"{name}, QK-norm": latent_of(f"{name}, QK-norm") for name in held.NORM_SWITCHES},
    **{f"{name}, clipped": latent_of(f"{name}, clipped") for name in held.CLIPPED},
    **{f"{name} as deepseek_v3": Row(name, "deepseek_v3", AS_DEEPSEEK.get(name, {}))
       for name in DEEPSEEK.families if FAMILIES[name].has_heads},
    **{f"{name}, a layer kept": latent_of(name)._replace(kept=(1,)) for name in WITH_HEADS},
    "gpt2, layers kept, logits divided by the layer": DIVIDED,
}  # fmt: skip
# Windows, caps and ALiBi; no RoPE, some, or none in some layers; experts; norms of each form, clamps; what a stock class needs.
KINDS = (
    "bloom", "codegen", "cohere, QK-norm", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "mixtral", "mpt, clipped", "olmo2",
    "smollm3", "stablelm, QK-norm", *(f"{name} as deepseek_v3" for name in ("llama", "phi3", "qwen2")),
    *(f"{name}, a layer kept" for name in ("llama", "gptj", "gpt2", "gemma3_text", "phi3")),
    "gpt2, layers kept, logits divided by the layer",
)  # fmt: skip
FITTED = ("gemma2", "smollm3", "stablelm, QK-norm", "llama as deepseek_v3")
OTHER_METHODS = [(method, "llama as deepseek_v3") for method in WAYS if method not in ("svd", "weighted with text")]
# The same, where a row costs more: each form of norms, caps, windows, experts and positions once.
BOTH = (
    "bloom", "gemma2", "stablelm, QK-norm", "qwen2 as deepseek_v3", "llama, a layer kept",
    "olmo2, a layer kept",
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "name"),
    rows(
        [*(("svd", name) for name in LATENTS), *(("weighted with text", name) for name in LATENTS), *OTHER_METHODS],
        [*(("svd", name) for name in KINDS), *(("weighted with text", name) for name in FITTED), *OTHER_METHODS],
    ),
)
def test_full_size_gives_the_sources_logits(method: str, name: str, made: Made) -> None:
    row = LATENTS[name]
    source, out = made(row, method)
    config = read(out / "config.json")
    assert config["model_type"] == row.holds
    if row.holds == MODEL_TYPE:
        assert config["text_config"]["model_type"] == INSIDE.get(row.model_type, row.model_type)
        assert bool(config.get("qk_norm")) == (name.endswith("QK-norm") or row.model_type in ALWAYS_NORMALISED)
        assert config.get("clip_qkv") == (0.5 if name.endswith("clipped") else None)
    ids = tokens(2, 20)  # beyond the windows and the positions that YARN was made for
    expected = said(stock(source), ids)
    same_logits(said(stock(out), ids), expected, tolerance(method))
    same_logits(said(load(out, when="always"), ids), expected, tolerance(method))


@pytest.mark.parametrize("name", rows(LATENTS, BOTH))
def test_small_sizes_run_alike_in_every_way(name: str, made: Made, convert: Convert, tmp_path: Path) -> None:
    """Absorbed or not, with the cache that the plan says, in beams and behind padding, and saved again."""
    row = LATENTS[name]
    source, out = made(row, "small")
    plain, absorbed = stock(out), load(out, when="always")
    assert all(map(is_absorbed, (module for module in absorbed.modules() if isinstance(module, Own))))
    planned = bytes_planned(convert, "mla", source, tmp_path / "out", small(row))
    if "sliding_window" not in row.changes:  # such layers forget
        before = AttentionSpec.from_config(Source.parse(str(source)).config)
        kept = len(row.kept) * before.values_per_token // 3
        assert planned == ((3 - len(row.kept)) * (24 + (0 if row.model_type in NO_ROPE else 4)) + kept) * 4
        assert measured_bytes_per_token(absorbed, "float32") == measured_bytes_per_token(plain, "float32") == planned
    ids = tokens(2, 12)
    expected = said(plain, ids)
    same_logits(said(absorbed, ids), expected)
    eager = load(out, attn_implementation="eager")
    same_logits(said(eager, ids), expected)
    with torch.inference_mode():
        assert eager(ids, output_attentions=True).attentions[0].shape == (2, 8, 12, 12)
        beams = [model.generate(ids[:1], num_beams=3, max_new_tokens=8, do_sample=False) for model in (plain, absorbed)]
    assert beams[0].shape == beams[1].shape
    assert torch.equal(decodes_alike(plain, ids, static=False), decodes_alike(absorbed, ids))
    absorbed.save_pretrained(tmp_path / "again")
    same_logits(said(stock(tmp_path / "again"), ids), expected, 1e-6)


# Of models whose own rounding does not grow with every layer.
HALVED = ("bloom", "falcon", "gemma", "gpt2", "gpt_neo", "gpt_neox", "gptj", "mixtral", "mpt", "olmo", "qwen3", "xglm")


@pytest.mark.parametrize("name", rows(HALVED, ["gpt_neo", "gpt_neox", "mpt"]))
def test_half_precision_is_that_of_the_source(name: str, made: Made) -> None:
    source, out = made(LATENTS[name], "bfloat16")
    ids, dtype = tokens(2, 12), {"dtype": torch.bfloat16}
    exact, half = said(stock(source), ids), said(stock(source, **dtype), ids)

    def error(found: torch.Tensor) -> float:
        if name == "mixtral":
            # Rounding gives a token another expert, and those behind it other keys: most have theirs.
            return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        return float((found - exact).norm() / exact.norm())

    for model in (stock(out, **dtype), load(out, when="always", **dtype)):
        assert error(said(model, ids)) < 3 * error(half) + 0.02


ONE_KIND = (PHI, BIGCODE)


def test_what_stock_classes_cannot_hold_is_held() -> None:
    """Every entry of `BEYOND` is indeed refused there, so that the rows above are about kvfold's class."""
    for name, changes in held.BEYOND.items():
        family = FAMILIES[name].of(tiny_config(name, **changes))
        target = family.spec.latent(8, 2)
        assert DEEPSEEK.refuses(family, target), name
        assert LATENT_HOST.refuses(family, target) is None, name


@pytest.mark.parametrize("host", [DEEPSEEK, *ONE_KIND], ids=lambda host: host.name)
def test_other_blocks_are_refused(host: Host) -> None:
    for name, row in FAMILIES.items():
        if name not in host.families and row.has_heads:
            family = row.of(tiny_config(name))
            target = family.spec.grouped(1) if host in ONE_KIND else family.spec.latent(16, 8)
            assert f"{name} does not have " in str(host.refuses(family, target))


RUN = """
import json
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE, *paths = sys.argv[1:]
for path in paths:
    with open(path + "/config.json") as file:
        own = {"trust_remote_code": True} if "auto_map" in json.load(file) else {}
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **own)
    assert not any(info.values()), info
    ids = AutoTokenizer.from_pretrained(path, **own)("once upon", return_tensors="pt")
    ways = [{}, {} if type(model).__name__ == "GPTNeoForCausalLM" else {"cache_implementation": "static"}]
    said = [model.generate(**ids, max_new_tokens=10, do_sample=False, **way).tolist() for way in ways]
    print(json.dumps([type(model).__name__, said, model(**ids).past_key_values.layers[0].keys.shape[1]]))
"""
CLASSES = {
    MODEL_TYPE: "KvfoldForCausalLM", "phi": "PhiForCausalLM", "gpt_bigcode": "GPTBigCodeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
# Of each class that holds results, with what it needs its code for: ALiBi, caps, norms, RoPE in neighbouring or complex pairs.
WITHOUT = {
    "a few": (
        ("codegen", "gpt_neox", "gpt2, one head"),
        ("gemma2", "qwen3", "llama as deepseek_v3"),
    ),
    "since 5.23": (("bloom",), ("bloom", "qwen2 as deepseek_v3")),
    "the others": (
        ("biogpt", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "llama", "mpt", "opt", "qwen2", "xglm", "opt, one head",
         "gpt_neo, one head"),
        ("biogpt", "codegen", "cohere2", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "xglm"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", rows(WITHOUT, ["a few"]))
def test_results_run_where_kvfold_is_not_installed(which: str, made: Made, tmp_path: Path) -> None:
    """Results of full size say what their sources say, also over a static cache."""
    heads, latents = WITHOUT[which]
    pairs = [(HEADS[name], *made(HEADS[name], "heads")) for name in heads]
    pairs += [(LATENTS[name], *made(LATENTS[name], "svd")) for name in latents]
    done = run_without_kvfold(RUN, tmp_path / "modules", *(path for _, *paths in pairs for path in paths))
    assert done.returncode == 0, done.stderr
    results = list(map(json.loads, done.stdout.splitlines()))
    for (row, _, out), before, after in zip(pairs, results[::2], results[1::2], strict=True):
        assert after == [CLASSES.get(row.holds, before[0]), before[1], row.groups or 1], row
        assert {file.name for file in out.glob("*.py")} == ({file.name for file in CODE} if row.holds == MODEL_TYPE else set())
