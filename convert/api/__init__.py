"""The Python API, which the command line calls too: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect, refresh`.

Arguments have the names and defaults of the options. Functions return objects, raise `Refusal` or `Failure`, print nothing
and warn through the logger "kvfold".
"""

from convert.api.conversions import gqa, mla, mqa
from convert.api.facts import inspect, plan, refresh
from convert.api.heals import heal
from convert.api.sweeps import sweep

__all__ = ["gqa", "heal", "inspect", "mla", "mqa", "plan", "refresh", "sweep"]
