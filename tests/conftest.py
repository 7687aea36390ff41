"""Tiny random checkpoints of every family, made on the fly; no network, no GPU."""

import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Tiny models gain nothing from threads, and lose much to threads that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads this when it is imported, which only the tests of kernels make happen. Set to 0, these run on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from packaging.version import Version
from tiny import duplicate_kv_heads, published, save_published, save_tokenizer, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from written import RESULTS, Find, Finished, characters, ok

from attention.models import register
from convert.execute.checking import checked
from convert.planning.texts import OWN

register()
# Nothing here is to outlive the machine, and a suite waits for disks for a minute; tests of what is synced watch the calls.
os.fsync = lambda descriptor: None


def pytest_collection_finish() -> None:
    """What imports made stays: every collection of garbage would look through it again."""
    gc.freeze()


_TOKENIZER = "before transformers 5.23 a qwen2 tokenizer loads by its model type alone, and the conversion is refused"
_STATIC = "before transformers 5.23 BLOOM raises an error over a static cache"
# Tests of what transformers itself does from 5.23 on, with what happens before.
SINCE_5_23 = {
    "test_trainable.py::test_its_products_are_written_into_the_matrices[qwen2 mla]": _TOKENIZER,
    "test_contract.py::test_full_size_gives_the_sources_logits[svd-qwen2 as deepseek_v3]": _TOKENIZER,
    "test_contract.py::test_small_sizes_run_alike_in_every_way[qwen2 as deepseek_v3]": _TOKENIZER,
    "test_contract.py::test_results_run_where_kvfold_is_not_installed[since 5.23]": f"{_STATIC}; {_TOKENIZER}",
    "test_contract.py::test_fewer_heads_run_alike_in_every_way[bloom]": _STATIC,
    "test_contract.py::test_small_sizes_run_alike_in_every_way[bloom]": _STATIC,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Version(transformers.__version__) >= Version("5.23"):
        return
    for item in items:
        if reason := SINCE_5_23.get(item.nodeid.rpartition("/")[2]):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def weights_alone() -> Iterator[None]:
    """Conversions without text write none, and none are healed or checked: all take longer than to convert a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.planning.calibration.DEFAULT", ())
        patch.setattr("convert.planning.base.HEALED", 0)
        patch.setattr("convert.converting.checked", lambda *args: None)
        yield


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions as people run them: the model writes a text where none is given, and results are checked."""
    monkeypatch.setattr("convert.planning.calibration.DEFAULT", (OWN,))
    monkeypatch.setattr("convert.converting.checked", checked)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny random checkpoints that tests have asked for: each is made once, and none is to be changed."""
    directory, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def find(
        model_type: str = "llama", duplicated: int = 1, shard: str = "5GB", as_published: bool = False, **changes: Any
    ) -> Path:
        asked = repr((model_type, duplicated, shard, as_published, changes))
        path = made.setdefault(asked, directory / str(len(made)) / "source")
        if not path.exists():
            model = tiny_model(tiny_config(model_type, **(published(model_type) if as_published else {}), **changes))
            if duplicated > 1:
                duplicate_kv_heads(model, duplicated)
            if as_published:
                save_published(model, path)
            else:
                model.save_pretrained(path, max_shard_size=shard)
            save_tokenizer(path)
        return path

    return find


@pytest.fixture
def checkpoint(shelf: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of one: `checkpoint("llama", name="source", duplicated=2, shard="20KB", num_attention_heads=4)`.

    `as_published` gives it the config and the files that models on the Hub have.
    """

    def make(model_type: str = "llama", name: str = "source", **how: Any) -> Path:
        found = shelf(model_type, **how)
        return Path(shutil.copytree(found, tmp_path / name, copy_function=shutil.copyfile, dirs_exist_ok=True))

    return make


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """Logits of a checkpoint on fixed tokens, fp32."""

    def run(path: Path | str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        ids = torch.randint(4, model.config.get_text_config().vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            return model(ids).logits

    return run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories from which models are loaded, in order."""
    seen, load = list[str](), AutoModelForCausalLM.from_pretrained

    def counted(path: Path, **options: object) -> object:
        seen.append(str(path))
        return load(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    return seen


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the library has warned of so far, as a program hears it that has set up no logging."""
    logger = logging.getLogger("kvfold")
    for name, value in (("handlers", []), ("level", logging.NOTSET), ("propagate", True)):  # a command sets up its own
        monkeypatch.setattr(logger, name, value)
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kvfold"]


@pytest.fixture(scope="session")
def convert() -> Callable[..., Result]:
    """Run the command line in this process: `convert("gqa", path, out, "--groups", 2)`."""
    from convert.command.cli import main

    def run(*arguments: object, color: bool = False) -> Result:
        return CliRunner().invoke(main, [str(a) for a in arguments], color=color)

    return run


@pytest.fixture(scope="session")
def finished(shelf: Callable[..., Path], convert: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Results of `RESULTS` that tests have asked for: each is made once, and none is to be changed."""
    directory, found, logger = tmp_path_factory.mktemp("results"), dict[str, Finished](), logging.getLogger("kvfold")
    text = characters(directory / "text.txt")

    def find(name: str) -> Finished:
        if name not in found:
            model_type, changes, options = RESULTS[name]
            command, *given = (text if option == "TEXT" else option for option in options)
            source, out = shelf(model_type, **changes), directory / name
            with pytest.MonkeyPatch.context() as patch:
                for kept in ("handlers", "level", "propagate"):  # a command sets up its own
                    patch.setattr(logger, kept, getattr(logger, kept))
                if name == "own text":
                    patch.setattr("convert.planning.calibration.DEFAULT", (OWN,))
                    patch.setattr("convert.converting.checked", checked)
                done = ok(convert(command, source, out, *given))
            found[name] = Finished(source, out, [command, source, out, *given], done.stdout, done.stderr)
        return found[name]

    return find
