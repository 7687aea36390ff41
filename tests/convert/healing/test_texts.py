"""Texts to heal on: which blocks are held out, in which order the others come, and what the teacher writes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import save_tokenizer

from attention.errors import Failure
from convert import Healing, heal
from convert.healing.texts import TrainingText, TrainingTexts, held_out
from eval.inputs.text import OWN_TEXT, Tokens


def tokens(count: int) -> Tokens:
    return Tokens("a text", torch.arange(count), count, 1.0, None)


def cut(*texts: Tokens, batch: int = 1, wanted: int = 10**6, context: int = 4, limit: int = 4) -> TrainingText:
    """Texts in blocks, of four tokens unless another number is given: too short for anything to come back in them."""
    plan: Any = SimpleNamespace(context=context, tokens=wanted, batch=batch, retrieval_limit=limit)
    return TrainingText.of(plan, texts)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 400), st.integers(1, 5), st.integers(1, 10**6))
def test_no_block_is_both_trained_on_and_held_out(blocks: int, batch: int, wanted: int) -> None:
    if blocks < batch + 1 + blocks // 8:
        return
    text = cut(tokens(blocks * 4 + 3), batch=batch, wanted=wanted)
    assert sorted(torch.cat((text.parts[0], text.held_out)).tolist()) == list(range(blocks))
    assert text.blocks[:, 0].tolist() == list(range(0, blocks * 4, 4))
    assert len(text.held_out) == max(1, blocks // 8)  # these blocks are so short that all of them are 2048 tokens at most


@pytest.mark.parametrize(
    ("blocks", "context", "wanted", "count"),
    [
        (10**6, 512, 10**9, 64),  # 32768 tokens, however long the training is
        (10**6, 512, 10**6, 39),  # a fiftieth of it
        (10**4, 512, 2000, 4),  # 2048 tokens, however short it is,
        (40, 2048, 2000, 1),
        (16, 512, 2000, 2),  # but an eighth of the text at most
        (3, 512, 2000, 1),
    ],
)
def test_so_much_is_held_out_that_it_tells(blocks: int, context: int, wanted: int, count: int) -> None:
    assert held_out(blocks, context, wanted) == count


def test_every_pass_sees_every_block_once_in_another_order() -> None:
    text = cut(tokens(4 * 11))
    assert len(text.parts[0]) == 10
    order = text.order(30, seed=5).tolist()  # three passes
    passes = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == text.parts[0].tolist() for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert text.order(12, seed=5).tolist() == order[:12]
    assert text.order(30, seed=6).tolist() != order
    assert text.passes(10, 3) == 3


def test_several_texts_are_cut_and_held_out_apart() -> None:
    first, second = tokens(4 * 11 + 3), Tokens("another", 1000 + torch.arange(4 * 4), 16, 1.0, None)
    text = cut(first, second, batch=2)
    assert text.tokens.name == "a text and another"
    assert text.blocks.shape == (15, 4)
    assert [len(part) for part in text.parts] == [10, 3]
    drawn = text.order(40, seed=5)
    of_second = drawn[text.blocks[drawn, 0] >= 1000]
    assert len(of_second) == 20, "texts take turns"
    assert all(sorted(of_second[i : i + 3].tolist()) == text.parts[1].tolist() for i in range(0, 18, 3))
    assert not set(drawn.tolist()) & set(text.held_out.tolist())
    assert text.passes(21, 2) == 7
    with pytest.raises(Failure, match="a text and another has 15 blocks of 4 tokens; a step takes 14, beside 2 held out"):
        cut(first, second, batch=14)
    with pytest.raises(Failure, match="another has 1 blocks of 4 tokens, too few to hold one out"):
        cut(first, Tokens("another", torch.arange(4), 4, 1.0, None))


def test_a_text_shorter_than_a_step_is_named() -> None:
    with pytest.raises(Failure, match=r"a text has 4 blocks of 4 tokens; a step takes 4, beside 1 held out") as error:
        cut(tokens(17), batch=4)
    assert "--batch-tokens" in str(error.value.hint)


def test_what_the_teacher_writes_is_kept_and_named(healed: Healing) -> None:
    own, file = healed.provenance["healing"]["texts"]
    assert (own["text"], own["hash"]) == ("the teacher's own text", None)
    assert (file["text"], file["hash"].partition(":")[0]) == ("train.txt", "sha256")
    assert healed.provenance["healing"]["text"] == "the teacher's own text and train.txt"
    assert load_file(healed.output / OWN_TEXT)["ids"].shape == (22, 16), "half of 40, and two to judge by"
    assert "--text self" in (healed.output / "README.md").read_text()


def test_it_is_read_again_where_its_file_is_given(
    healed: Healing, converted: Path, sizes: dict[str, Any], tmp_path: Path
) -> None:
    given = {"text": healed.output / OWN_TEXT, "dry_run": True} | sizes
    texts = TrainingTexts.read(heal(converted, tmp_path / "out", **given).plan)
    assert texts.rows_to_write == 0
    assert torch.equal(texts.whole().tokens.ids.view(-1, 16), load_file(healed.output / OWN_TEXT)["ids"].long())


def test_without_text_the_teacher_writes_all_of_it(converted: Path, sizes: dict[str, Any], tmp_path: Path) -> None:
    planned = heal(converted, tmp_path / "out", dry_run=True, **sizes)
    assert planned.passes == 1.0
    assert TrainingTexts.read(planned.plan).rows_to_write == 45, "40 rows to train on, and an eighth to judge by"


@pytest.mark.parametrize(
    ("size", "texts", "says"),
    [
        (64, None, "make other tokens of the same text"),
        (0, ["too short"], "has 0 blocks of 16 tokens, too few to hold one out"),
    ],
)
def test_texts_that_cannot_be_trained_on_are_refused(
    size: int, texts: list[str] | None, says: str, converted: Path, text: Path, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted, tmp_path / "mqa"))
    if size:
        save_tokenizer(path, size)
    with pytest.raises(Failure, match=says):
        heal(path, tmp_path / "out", text=texts or text, **sizes)
    assert not (tmp_path / "out.partial").exists()


def test_every_other_block_retrieves_over_all_positions() -> None:
    """Of those to train on, and of those to judge by."""
    plain = torch.arange(40 * 64).view(40, 64)
    text = cut(tokens(40 * 64), context=64, limit=4096)
    skipping = (text.positions != torch.arange(64)).any(1)
    assert torch.equal(text.blocks[~skipping], plain[~skipping])
    assert (text.blocks[skipping] != plain[skipping]).any(1).all()
    for part in (*text.parts, text.held_out):
        assert int(skipping[part].sum()) in (len(part) // 2, len(part) // 2 - 1)
    assert 2000 < int(text.positions.max()) < 4096
