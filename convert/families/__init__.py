"""The registry of families: every model type that kvfold can read, by its name in config.json."""

from attention.errors import Refusal
from convert.families import fused_qkv, latent, rows
from convert.families.base import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*rows.ROWS, *fused_qkv.ROWS, *latent.ROWS)}

# Model types that are not read on purpose, and why.
UNREAD = {
    "ctrl": "its class calls an attention with values, keys and queries apart, which no output class takes",
    "openai-gpt": "its class in transformers keeps no KV cache",
}

__all__ = ["FAMILIES", "UNREAD", "Family", "family_of"]


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`.

    Args:
        model_type: As in config.json.

    Raises:
        Refusal: No family has that model type, with the reason if there is one; the hint lists the known ones.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise Refusal(
        f"model type {model_type!r} is not supported{f': {UNREAD[model_type]}' if model_type in UNREAD else ''}",
        hint=f"supported: {', '.join(sorted(FAMILIES))} (see `convert families`)",
    )
