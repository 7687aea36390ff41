"""kvfold's own class: the stock class with other attention computes the record, in every state a decoder meets."""

import ast
import copy
import hashlib
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_forked
from tiny import tiny_config
from tiny_mla import checkpoint_activations, error, logits, padding, tokens
from transformers import AutoModelForCausalLM, StaticCache

from attention import load, models, pack, restore
from attention.grouped import is_packed
from attention.models import modeling_kvfold
from attention.models.configuration_kvfold import KvfoldConfig
from attention.record import Scoring
from attention.reference import grouped_attention
from convert.families import FAMILIES
from convert.families.kvfold import around
from convert.families.projections import split_projections

LENGTH = 30
WITH_SDPA = ("gpt_neox", "gpt2", "opt", "gpt_bigcode", "biogpt")
WINDOWS: list[int | None] = [4, None, 7]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox, full rotary": (
        "gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "biogpt": ("biogpt", {}),
    "gpt2, windows": ("gpt2", {"windows": WINDOWS}),
}  # fmt: skip


def own_model(
    model_type: str = "gpt_neox",
    kv_heads: int = 2,
    attention: str | None = "sdpa",
    windows: list[int | None] | None = None,
    **changes: Any,
) -> Any:
    inner = tiny_config(model_type, **changes)
    inner.num_key_value_heads = kv_heads
    biased, path = getattr(inner, "attention_bias", True), FAMILIES[model_type].attention_path
    sizes = {"attention_path": path, "qkv_bias": biased, "o_bias": biased, "inner_windows": windows}
    config = KvfoldConfig(text_config=inner, scaling=0.3, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def attentions(model: Any) -> list[Any]:
    return [model.model.get_submodule(model.config.attention_path.format(layer=layer)) for layer in range(3)]


@pytest.mark.parametrize(
    ("way", "kv_heads", "attention"),
    [
        *((way, 2, "sdpa") for way in WAYS),
        ("gpt_neox", 1, "eager"),
        ("gpt_neox", 8, "sdpa"),
        ("gpt2", 1, "sdpa"),
        ("gpt2, windows", 2, "eager"),
    ],
)
def test_a_layers_attention_is_the_reference(way: str, kv_heads: int, attention: str) -> None:
    model_type, changes = WAYS[way]
    model = own_model(model_type, kv_heads, attention, **changes)
    family = around(FAMILIES[model_type]).of(model.config)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in attentions(model):
        module.register_forward_hook(
            lambda _, args, kwargs, out: calls.append((kwargs.get("hidden_states", args[0] if args else None), out[0])),
            with_kwargs=True,
        )
    with torch.inference_mode():
        model(tokens(2, LENGTH))
        for layer, (x, out) in enumerate(calls):
            tensors = {name: model.state_dict()[name] for name in family.shapes(layer)}
            local = {name.removeprefix(f"{family.module(layer)}."): tensor for name, tensor in tensors.items()}
            record = split_projections(local, family.spec.head_dim, family.scale, family.rotary(layer))
            windowed = replace(record, scoring=Scoring(window=WINDOWS[layer])) if "windows" in changes else record
            assert error(out, grouped_attention(x, windowed)) < 3e-6
            back = family.join(record, family.spec, layer)
            assert back.keys() == tensors.keys()
            assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("attention", "static", "chunks"), [("eager", False, (7, 5, 3)), ("sdpa", True, (10,)), ("packed", True, (7, 5, 3))]
)
def test_a_cache_changes_no_inner_window(attention: str, static: bool, chunks: tuple[int, ...]) -> None:
    ids = tokens(2, LENGTH)
    model = own_model("gpt2", attention="eager" if attention == "eager" else "sdpa", windows=WINDOWS)
    with torch.inference_mode():
        expected = model(ids).logits
    if attention == "packed":
        assert all(map(is_packed, attentions(pack(model))))
    cache = StaticCache(config=model.config, max_cache_len=40) if static else None
    assert error(logits(model, ids, chunks=chunks, cache=cache), expected) < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_left_padded_row_has_the_inner_windows_of_the_row_alone(attention: str) -> None:
    model, ids, lengths = own_model("gpt2", attention=attention, windows=WINDOWS), tokens(3, 30), [30, 19, 26]
    said = model.generate(ids, attention_mask=padding(lengths), max_new_tokens=6, do_sample=False)
    for row, length in enumerate(lengths):
        embeds = model.get_input_embeddings()(ids[row : row + 1, -length:])
        alone = model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False)
        assert torch.equal(said[row, -6:], alone[0, -6:])


def test_functions_that_would_leave_an_inner_window_out_are_refused() -> None:
    module, x = attentions(own_model("gpt2", windows=WINDOWS))[0], torch.randn(1, 9, 64)
    with pytest.raises(ValueError, match=r"windows in its attention, which paged\|sdpa leaves out"):
        module.windowed(None, "paged|sdpa", x, None)
    with pytest.raises(ValueError, match="which sdpa leaves out"):
        module.windowed(torch.ones(1, 9), "sdpa", x, None)
    padding = torch.ones(1, 9)
    assert module.windowed(padding, "flash_attention_2", x, None) is padding, "it gets the window as an argument"
    assert module.attention_arguments()["sliding_window"] == 4


@pytest.mark.parametrize("windows", [[4, None], [4, None, 0], 4])
def test_inner_windows_that_do_not_fit_are_refused(windows: Any) -> None:
    with pytest.raises(ValueError, match=r"inner_windows is .*; it must list a number above 0, or null, for each of 3 layers"):
        own_model("gpt2", windows=windows)


def test_it_attends_as_the_sources_class_can() -> None:
    model = own_model("xglm", attention=None)
    assert (model._supports_sdpa, model._supports_flash_attn) == (False, False)
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        own_model("xglm", attention="sdpa")


@pytest.mark.parametrize(
    ("model_type", "key", "other"),
    [
        ("gpt2", "resid_pdrop", "attn_pdrop"), ("gpt_bigcode", "resid_pdrop", "attn_pdrop"),
        ("gpt_neo", "resid_dropout", "attention_dropout"),
    ],
)  # fmt: skip
def test_what_attention_gives_is_dropped_as_in_the_sources_class(model_type: str, key: str, other: str) -> None:
    model, x = own_model(model_type, attention=None, **{key: 0.5, other: 0.0}), torch.randn(1, 50, 64)
    attention = attentions(model)[0]
    assert not (attention(x)[0] == 0).any()
    assert 0.3 < float((attention.train()(x)[0] == 0).float().mean()) < 0.7


def test_probabilities_are_dropped_as_in_the_sources_class() -> None:
    for model_type, key in (("gpt2", "attn_pdrop"), ("opt", "attention_dropout"), ("biogpt", "attention_probs_dropout_prob")):
        assert attentions(own_model(model_type, **{key: 0.25}))[0].attention_dropout == 0.25


@pytest.mark.parametrize(("model_type", "tied"), [*((name, False) for name in WITH_SDPA), ("gpt2", True)])
def test_what_is_saved_is_loaded(model_type: str, tied: bool, tmp_path: Path) -> None:
    model, ids = own_model(model_type, tie_word_embeddings=tied), tokens(2, 9)
    model.save_pretrained(tmp_path / "saved")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    for file in models.CODE:
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()
    assert again.config.auto_map == models.AUTO_MAP
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert error(load(tmp_path / "saved")(ids).logits, model(ids).logits) < 1e-5
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied


def loaded(kind: str, path: Path, form: str | None) -> Any:
    """A model of kvfold's class from `load`: "gpt_neox" with shared heads, or "qwen3" with a latent."""
    model = own_model() if kind == "gpt_neox" else None
    if model is None:
        inner = tiny_config(kind, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
        config = KvfoldConfig(text_config=inner, attention_path="model.layers.{layer}.self_attn", rope_pairs=[0, 1, 2, 3])
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return load(path, cache_dtype=form)


UNPICKLED = """
import pickle, sys
from pathlib import Path
model, ids, said = pickle.loads(Path(sys.argv[1]).read_bytes())
assert model.generate(ids, max_new_tokens=6, do_sample=False).tolist() == said
pickle.dumps(model)
"""


@pytest.mark.parametrize(("kind", "form"), [("gpt_neox", None), ("qwen3", "int8")])
def test_copies_are_models_of_their_own(kind: str, form: str | None, tmp_path: Path) -> None:
    model, ids = loaded(kind, tmp_path / "saved", form), tokens(1, 14)
    expected = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        assert not set(map(id, twin.parameters())) & set(map(id, model.parameters()))
        assert torch.equal(logits(twin, ids), expected)
        assert torch.equal(logits(restore(twin), ids), logits(restore(copy.deepcopy(model)), ids))
        pickle.dumps(twin)
    said = model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
    (tmp_path / "pickled").write_bytes(pickle.dumps((model, ids, said)))
    done = run_forked(UNPICKLED, tmp_path / "pickled")
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_quantised_model_decodes_as_the_class_does(tmp_path: Path) -> None:
    """Its `kv_b_proj` is then no Linear whose weights could be absorbed."""
    model, ids = loaded("qwen3", tmp_path, None), tokens(1, 14)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    found = logits(quantised, ids)
    assert error(found, logits(model, ids)) > 1e-2
    assert error(found, logits(restore(quantised), ids)) < 1e-3


@pytest.mark.parametrize("model_type", WITH_SDPA)
def test_gradients_reach_every_weight(model_type: str) -> None:
    model = own_model(model_type).train()
    checkpoint_activations(model)
    model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    # A key's bias cancels in the softmax where positions do not rotate it.
    names = [name for name, p in model.named_parameters() if p.grad is None or float(p.grad.norm()) < 1e-6]
    assert [name for name in names if not name.endswith("k_proj.bias")] == []


def test_a_rope_key_without_cosines_is_an_error() -> None:
    """GPT-2's class has none, and passes none to what is put in the place of its attention."""
    inner = tiny_config("gpt2", kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    config = KvfoldConfig(text_config=inner, attention_path="transformer.h.{layer}.attn", rope_pairs=[0, 1])
    with pytest.raises(ValueError, match="gives it no cosines and sines"):
        AutoModelForCausalLM.from_config(config)(tokens(1, 4))


def test_the_code_that_comes_with_a_checkpoint_needs_nothing_of_kvfold() -> None:
    imported, beside = set(), set()
    for file in models.CODE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                beside.add(f"{node.module}.py")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported.add((node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name)
    roots = {name.partition(".")[0] for name in imported}
    assert roots - sys.stdlib_module_names == {"torch", "transformers"}
    assert beside <= {file.name for file in models.CODE}


# Of both files, by their CODE_VERSION.
HASHES = {1: "28be0c6311b496d1e0bd4fc298d4b0d697ccf65242357245a9ac4043c2b6c28b"}


def test_the_code_has_a_new_version_when_it_has_changed() -> None:
    """If one has changed since the last release: raise CODE_VERSION in both, and add a line. Else correct the last line."""
    found = hashlib.sha256(b"".join(file.read_bytes() for file in models.CODE)).hexdigest()
    versions = {models.code_version(file) for file in models.CODE}
    assert versions == {max(HASHES)} == {modeling_kvfold.CODE_VERSION}
    assert HASHES[max(HASHES)] == found


FRESH = """
import json, sys
from pathlib import Path
import attention
from attention.auto import auto_class, config_of
config = config_of(json.loads(Path(sys.argv[1], "config.json").read_text()))
assert type(config).__module__ == "attention.models.configuration_kvfold"
model = attention.load(sys.argv[1])
assert type(model).__module__ == type(auto_class(config).from_config(config)).__module__ == "attention.models.modeling_kvfold"
"""


def test_a_fresh_process_runs_its_own_code_and_not_what_lies_beside_the_weights(tmp_path: Path) -> None:
    own_model().save_pretrained(tmp_path)
    for file in models.CODE:
        (tmp_path / file.name).write_text("raise SystemExit('this code is not needed')", encoding="utf-8")
    done = run_forked(FRESH, tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_attention_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, attention; print(*{'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_that_sees_no_token_is_finite_in_half_precision(dtype: torch.dtype) -> None:
    """As the rows of left padding are, whose mask is the least number of the dtype."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2, 5, 8, generator=generator).to(dtype) * 8 for _ in range(3))
    mask = torch.full((1, 1, 5, 5), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[:, :, :2] = torch.finfo(dtype).min
    out, probabilities = modeling_kvfold.eager(SimpleNamespace(num_key_value_groups=1, training=False), -q, k, v, mask, 1.0)
    assert out.isfinite().all()
    assert probabilities.isfinite().all()


@pytest.mark.parametrize("kind", ["alibi", "position_bias"])
def test_biases_of_far_positions_are_not_rounded_in_half_precision(kind: str) -> None:
    """They are near −1000 for the first of many tokens, where bfloat16 has steps of 4."""
    biases = torch.arange(-1023, 1)[None, None] * torch.tensor([0.5, 0.25])[:, None, None]  # [H, 1, S]
    queries, unseen = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1024, dtype=torch.bool)
    mask = unseen if kind == "position_bias" else unseen.to(torch.bfloat16)
    found = modeling_kvfold._Attention.mask_with_positions(None, mask, queries, 1024, {kind: biases})
    assert torch.equal(found, biases[None])
