"""Formats that only engines store: known answers of the engines' own code, which ran once on a CPU."""

import pytest
import torch

from attention import load
from attention.encoding import rounded
from attention.errors import Refusal
from attention.formats import SERVED, format_named, rounding_of
from attention.served import hadamard
from attention.spec import AttentionSpec

VALUES = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(64, generator=torch.Generator().manual_seed(1))
# What vLLM 0.33 and SGLang 0.5.23 read of VALUES, times WEIGHTS: Triton's kernels in its interpreter, the others as they are.
KNOWN = {
    ("int4_per_token_head", "keys"): [0.8561, 2.1587, 17.9399, -9.8126],
    ("int4_per_token_head", "values"): [0.8561, 2.1587, 17.9399, -9.8126],
    ("nvfp4", "keys"): [1.3849, 3.5704, 17.0104, -11.4713],
    ("fp4_mx_block16", "latent"): [-0.6057, 0.3629, 17.5183, -10.3507],
    ("fp4_mx_block16", "rope"): [-0.6057, 0.3629, 17.5183, -10.3507],
    ("turboquant_4bit_nc", "keys"): [2.1725, 2.5451, 18.7797, -10.8758],
    ("turboquant_4bit_nc", "values"): [0.9195, 2.0021, 17.2945, -9.4545],
    ("turboquant_3bit_nc", "keys"): [0.2452, 0.4433, 18.307, -12.3371],
    ("turboquant_3bit_nc", "values"): [0.1154, 3.0591, 19.3441, -8.4519],
}


@pytest.mark.parametrize(("form", "part"), KNOWN)
def test_values_are_rounded_as_the_engine_rounds_them(form: str, part: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):  # of a healing
        found = rounded(VALUES, SERVED[form], part)
    torch.testing.assert_close(found @ WEIGHTS, torch.tensor(KNOWN[form, part]), rtol=0, atol=1e-4)
    assert torch.equal(rounded(VALUES[1:2], SERVED[form], part), found[1:2]), "whatever is beside it"


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("form", SERVED)
def test_rounding_is_near_in_any_dtype_and_leaves_nothing(form: str, part: str) -> None:
    assert not rounded(torch.zeros(1, 64), SERVED[form], part).any()
    for values in (VALUES.bfloat16(), 1e3 * VALUES.half(), VALUES.double()):
        found = rounded(values, SERVED[form], part)
        assert found.dtype == values.dtype
        assert float((found - values).float().norm() / values.float().norm()) < 0.25


def test_heads_of_other_sizes_are_turned_in_parts() -> None:
    """In vLLM, by the largest power of two that divides them: known answers of it, too."""
    found = rounded(VALUES.view(-1, 128)[:, :96], SERVED["int4_per_token_head"], "keys") @ WEIGHTS.repeat(2)[:96]
    torch.testing.assert_close(found, torch.tensor([3.3397, 12.9706]), rtol=0, atol=1e-4)
    assert torch.equal(hadamard(torch.ones(2, 8), 4), torch.tensor([4.0, 0, 0, 0] * 2).expand(2, 8))


@pytest.mark.parametrize(
    ("form", "share"),
    [("int4_per_token_head", 36 / 128), ("nvfp4", 36 / 128), ("turboquant_4bit_nc", (6 * 70 + 4 * 256) / 2560),
     ("turboquant_3bit_nc", (6 * 54 + 4 * 256) / 2560), ("fp4_mx_block16", 36 / 128)],
)  # fmt: skip
def test_bytes_are_those_of_the_engine_which_leaves_layers_at_both_ends(form: str, share: float) -> None:
    spec = AttentionSpec(10, 4, 2, 64)
    assert spec.bytes_per_token(form) == pytest.approx(share * spec.bytes_per_token("bfloat16"))
    assert AttentionSpec(1, 4, 2, 64).format_of(0, SERVED[form]) is SERVED[form]
    kept = [spec.format_of(layer, SERVED[form]).name for layer in range(10)].count("bfloat16")
    assert kept == (4 if "turboquant" in form else 0)


def test_what_an_engine_does_not_cache_is_refused() -> None:
    latent = AttentionSpec(2, 4, 4, 64).latent(64, 16)
    assert latent.bytes_per_token("fp4_mx_block16") == 2 * (80 // 2 + 80 // 16)
    with pytest.raises(Refusal, match=r"vLLM 0\.33 caches no latent in nvfp4"):
        latent.bytes_per_token("nvfp4")
    with pytest.raises(Refusal, match="no head of 96 values in turboquant_3bit_nc: it must be a power of two"):
        AttentionSpec(2, 4, 4, 96).bytes_per_token("turboquant_3bit_nc")
    with pytest.raises(Refusal, match="a head of 24 values cannot be cached in nvfp4: it must be a multiple of 16"):
        AttentionSpec(2, 4, 4, 24).bytes_per_token("nvfp4")


def test_kvfold_stores_none_and_says_who_does(tmp_path: object) -> None:
    with pytest.raises(Refusal, match=r"kvfold stores no KV cache in nvfp4, which is vLLM 0\.33's") as caught:
        load(tmp_path, cache_dtype="nvfp4")
    assert "give that engine --kv-cache-dtype nvfp4" in str(caught.value.hint)
    assert rounding_of("nvfp4") is format_named("nvfp4")
