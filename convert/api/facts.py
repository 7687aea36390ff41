"""`plan` and `inspect`, which read configs alone, and `refresh`."""

from pathlib import Path
from typing import Unpack

from attention.errors import Refusal
from convert.arguments import options
from convert.hosts.engines import engine_of
from convert.output import companions
from convert.planning.allowed import readable, require_stored
from convert.planning.describe import Facts, capacity, inspection
from eval.arguments import checked
from eval.inputs.source import Source
from eval.machine.capacity import GPUS


@checked
def plan(model: str | Path, **given: Unpack[options.Plan]) -> Facts:
    """KV memory of each target, and the GPUs that it fits on; reads only the config.

    Args:
        model: Directory, GGUF file or Hub id.
        **given: The options, in `convert.arguments.options`.

    Returns:
        A dict of numbers; `str()` of it is a table for people.

    Raises:
        Refusal: The model cannot be read.
    """
    source, gpus = Source.parse(str(model), given["trust_remote_code"]), given["gpus"] or GPUS
    readable(source)  # first: its refusals say more than those of `source`
    for name, gigabytes in gpus.items():
        if not 1e-6 <= gigabytes <= 1e9:
            raise Refusal(f"memory of {name} is {gigabytes}; it must be at least 1e-06 and at most 1e+09")
    context = source.longest_context if given["context"] is None else int(given["context"])
    dtype, engine = given["dtype"] or source.dtype, engine_of(given["engine"])
    if engine:
        require_stored(engine, given["cache_dtype"], engine.caches, untried=True)
    return capacity(source, dtype, given["batch"], context, gpus, engine, given["cache_dtype"])


@checked
def inspect(model: str | Path, **given: Unpack[options.Inspect]) -> Facts:
    """A model's attention and what it can be converted to; reads only the config. Returns and raises what `plan` does.

    Args:
        model: As of `plan`.
        **given: The options, in `convert.arguments.options`.
    """
    return inspection(Source.parse(str(model), given["trust_remote_code"]))


@checked
def refresh(output: str | Path) -> Facts:
    """Renew the code beside the weights of a result of kvfold's class; nothing else in its directory changes.

    Args:
        output: The directory of the result.

    Returns:
        A dict of the versions of the code, before and now; `str()` of it is a line for people.

    Raises:
        Refusal: There is nothing to renew, or it is newer than this version's.
        Failure: Another run writes to the directory, or the files cannot be replaced.
    """
    found = companions.refresh(Path(output))
    renewed = [f"{name} ({f'version {before}' if before else 'no version'})" for name, before in found["renewed"].items()]
    said = f"renewed {' and '.join(renewed)}" if renewed else "there was nothing to renew"
    return Facts(found, f"{said}: the code in {output} is kvfold's, version {found['code_version']}")
