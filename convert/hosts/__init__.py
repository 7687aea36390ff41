"""The registry of hosts: the classes that can carry each kind of target, in order of preference."""

from __future__ import annotations

from convert.hosts import deepseek_v3, falcon, gpt_bigcode, inside, kvfold, minicpm3, phi, portable, source_class
from convert.hosts.base import Host

HOSTS: dict[str, tuple[Host, ...]] = {
    "gqa": (source_class.HOST, phi.HOST, kvfold.HOST),
    "mqa": (source_class.MQA_HOST, phi.HOST, gpt_bigcode.HOST, falcon.HOST, kvfold.HOST),
    "mla": (deepseek_v3.HOST, minicpm3.HOST, inside.HOST, kvfold.LATENT_HOST),
}

# The class that `mla --portable` makes, in place of those above.
PORTABLE: tuple[Host, ...] = (portable.HOST,)

__all__ = ["HOSTS", "PORTABLE", "Host"]
