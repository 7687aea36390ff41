"""The Python API, which the command line calls too: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect, refresh`.

Arguments have the names and defaults of the options. Functions return objects, raise `Refusal` or `Failure`, print nothing
and warn through the logger "kvfold".
"""
