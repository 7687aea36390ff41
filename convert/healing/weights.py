"""Writes a healed checkpoint: the files of the converted one, with the trained tensors in their places."""

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from attention.calibrated import Calibrated
from attention.errors import Failure, Refusal
from attention.models import AUTO_MAP, CODE, names_ours, provides
from convert.checkpoint.loading import ClassTensors
from convert.checkpoint.writer import write_shard
from convert.output.companions import copy_code, copy_companions, write_config
from convert.planning.positions import limited
from eval.inputs.reader import SAFETENSORS, Reader
from eval.inputs.source import Source
from eval.terminal.progress import Progress, stage


def held_parameters(model: Any, reader: Reader, names: Collection[str]) -> dict[str, str]:
    """Maps tensors of a checkpoint to the trained parameter that each holds; tied weights are in several tensors.

    Raises:
        Refusal: A trained parameter is made of several tensors.
        Failure: A trained parameter is in no tensor.
    """
    tensors = ClassTensors(model, reader.infos)
    whose = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    found: dict[str, str] = {}
    for name in tensors.names:
        parameter = whose.get(id(state[name]))
        if parameter is None or parameter not in names:
            continue
        if tensors.is_converted(name):
            raise Refusal(
                f"{name} is made of {len(tensors.sources(name))} tensors of the checkpoint, and cannot be written back",
                hint="use --train attention",
            )
        found |= dict.fromkeys(tensors.sources(name), parameter)
    if lost := sorted(set(names) - set(found.values())):
        raise Failure(f"the checkpoint has no tensor for {lost[0]}", hint="config.json and the weights are not of one model")
    return found


def write_files(
    directory: Path, reader: Reader, healed: Mapping[str, torch.Tensor], progress: Progress
) -> Iterator[tuple[str, str]]:
    """Write weight files one by one: their names and checksums.

    Args:
        directory: Where to. It may be the reader's own: a file is replaced when the new one is complete.
        reader: Reads the converted checkpoint's tensors.
        healed: The new tensors by name; empty to copy everything.
        progress: Called with the bytes written.

    Raises:
        Failure: A value is not finite in the dtype that it is stored in.
    """
    total = sum(info.nbytes for info in reader.infos.values())
    with stage(progress, "write", total, "byte") as done:
        for file in reader.files:
            names = [name for name in reader.infos if reader.file(name) == file]
            tensors = {name: healed[name] if name in healed else reader[name] for name in names}
            yield file, write_shard(directory / file, tensors, {name: reader.infos[name].dtype for name in names}, done)


def write_beside(directory: Path, converted: Source, context: int) -> Calibrated | None:
    """Write the files beside the weights: config.json, kvfold's code, tokenizer and the like; say what it is calibrated for.

    Args:
        directory: Where to.
        converted: The converted checkpoint.
        context: Tokens of the blocks that it was trained in, for which the result is calibrated, if they are longer than those
            that it was calibrated in; 0 if its weights stay.
    """
    if (index := converted.files / f"{SAFETENSORS}.index.json").is_file():
        shutil.copyfile(index, directory / index.name)
    before, raw, ours = converted.calibrated, converted.raw, provides(converted.model_type)
    shutil.copyfile(converted.files / "config.json", directory / "config.json")
    copy_companions(directory, converted.files, not ours)
    if before and context > before.positions:
        raw = limited(raw, context, before.of)
    if ours:
        copy_code(directory, CODE)
        raw = raw if names_ours(raw) else raw | {"auto_map": AUTO_MAP}
    if raw != converted.raw:
        write_config(directory, raw, None)
    return converted.beside(directory).calibrated
