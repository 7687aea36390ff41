"""How many bytes cached numbers take."""

import pytest

from attention.errors import Refusal
from attention.formats import FORMATS, format_named
from attention.spec import AttentionSpec

HEADS = AttentionSpec(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
LATENT = HEADS.latent(160, 32)


@pytest.mark.parametrize(
    ("form", "of_heads", "of_latent"),
    [
        ("bfloat16", 1.0, 0.5),
        ("fp8", 0.5, 0.25),
        ("int8", 0.53125, 13 / 48),  # 8 bits, and 32 of scales for every 64 values
        # Heads: 4 bits, and 32 for every 32. Latents: 6 bits in 4 of 30 layers, and 8 for all. RoPE keys: 8 values in 7
        # bits, 8 in 5 and 16 in 4, and 8 for each class.
        ("int4", 0.3125, (26 / 30 * (80 + 3 * 4) + 4 / 30 * (120 + 1) + 20 + 3) / 768),
        ("int3", 0.25, (26 / 30 * (60 + 3 * 4) + 4 / 30 * (120 + 1) + 20 + 3) / 768),
        ("int2", 0.1875, (26 / 30 * (40 + 3 * 4) + 4 / 30 * (120 + 1) + 20 + 3) / 768),
        ("q8_0", 34 / 64, 34 / 64 / 2),  # blocks of 32 values in 34 bytes
        ("q4_0", 18 / 64, 18 / 64 / 2),
    ],
)
def test_shares_of_a_long_cache_in_bfloat16_with_scales(form: str, of_heads: float, of_latent: float) -> None:
    whole = HEADS.bytes_per_token("bfloat16")
    assert HEADS.bytes_per_token(form) / whole == of_heads
    assert LATENT.bytes_per_token(form) / whole == pytest.approx(of_latent)


def test_sizes_that_do_not_fill_bytes_are_refused() -> None:
    with pytest.raises(Refusal, match="a head of 6 values cannot be cached in int2: it must be a multiple of 8") as caught:
        AttentionSpec(2, 4, 2, 6).bytes_per_token("int2")
    assert "int8" in str(caught.value.hint)
    with pytest.raises(Refusal, match="heads cannot be cached in mixed"):
        HEADS.keeping((1,), 3).bytes_per_token("mixed")
    with pytest.raises(Refusal, match="a latent of 12 values cannot be cached in int3"):
        HEADS.latent(12, 32).cache_bytes("int3", 5)
    assert AttentionSpec(2, 4, 2, 6).bytes_per_token("fp8") == 2 * 2 * 2 * 6
    assert AttentionSpec(2, 4, 2, 6).bytes_per_token("int8") == 2 * 2 * 2 * (6 + 4)


def test_channels_of_a_latent_may_differ_in_bits() -> None:
    """Of 160 in a latent and 32 in a RoPE key, with a scale for each class; the layers that copy have more bits."""
    mixed = (32 * 5 + 80 * 3 + 48 * 2 + 8 * 6 + 8 * 4 + 16 * 3) // 8 + 6
    precise = (32 * 7 + 80 * 5 + 48 * 4 + 8 * 7 + 8 * 5 + 16 * 4) // 8 + 6
    assert LATENT.bytes_per_token("mixed") == 26 * mixed + 4 * precise
    mixed2 = (16 * 5 + 32 * 3 + 32 * 2 + 80 * 1 + 8 * 6 + 8 * 4 + 16 * 3) // 8 + 7
    precise = (16 * 7 + 32 * 5 + 32 * 4 + 80 * 3 + 8 * 7 + 8 * 5 + 16 * 4) // 8 + 7
    assert LATENT.bytes_per_token("mixed2") == 26 * mixed2 + 4 * precise
    with pytest.raises(Refusal, match="heads cannot be cached in mixed: it is for latents"):
        HEADS.bytes_per_token("mixed")
    with pytest.raises(Refusal, match="a latent of 100 values cannot be cached in mixed: it must be a multiple of 8"):
        HEADS.latent(100, 32).bytes_per_token("mixed")


def test_an_unknown_format_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(Refusal, match=r"in 'int5' \(choose float64, .*bfloat16.*q4_0, mixed, mixed2, .*fp4_mx_block16\)"):
        format_named("int5")


def test_blocks_that_llama_cpp_does_not_store_are_refused() -> None:
    """It takes heads, and latents and RoPE keys in one row, whose sizes are multiples of 32."""
    latents = (HEADS.latent(48, 16), "latent of 48"), (HEADS.latent(96, 16), "RoPE key of 16")
    for spec, what in ((AttentionSpec(2, 4, 2, 80), "head of 80"), *latents):
        with pytest.raises(Refusal, match=f"a {what} values cannot be cached in q8_0: it must be a multiple of 32"):
            spec.bytes_per_token("q8_0")


@pytest.mark.parametrize(
    ("size", "of_keys", "of_values"), [(32, 1, 1), (64, 64, 64), (96, 1, 1), (128, 128, 64), (192, 64, 64), (256, 256, 64)]
)
def test_heads_are_rotated_where_llama_cpp_rotates_them(size: int, of_keys: int, of_values: int) -> None:
    for name, form in FORMATS.items():
        found = form.grouping("keys", size)[1], form.grouping("values", size)[1]
        assert found == ((of_keys, of_values) if name in ("q8_0", "q4_0") else (1, 1))
