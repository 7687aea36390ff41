"""The registry of hosts: the classes that can carry each kind of target, in order of preference."""

from convert.hosts import kvfold, latent, sharing, source_class
from convert.hosts.base import Host

HOSTS: dict[str, tuple[Host, ...]] = {
    "gqa": (source_class.HOST, sharing.PHI, kvfold.HOST),
    "mqa": (source_class.MQA_HOST, sharing.PHI, sharing.BIGCODE, kvfold.HOST),
    "mla": (latent.DEEPSEEK, latent.INSIDE, kvfold.LATENT_HOST),
}

# The class that `mla --portable` makes, in place of those above.
PORTABLE: tuple[Host, ...] = (latent.PORTABLE,)

__all__ = ["HOSTS", "PORTABLE", "Host"]
