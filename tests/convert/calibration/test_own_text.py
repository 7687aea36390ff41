"""What a model writes itself: how its rows begin, end and go on, what makes it the same again, and what cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from written import Make, edit, without_tokenizer

from attention.errors import Failure
from convert.calibration import own_text as writing
from convert.calibration.own_text import Turns, Voice, own_text
from eval.inputs.source import Source
from eval.terminal.progress import silent

CPU = torch.device("cpu")
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '[' + m['role'][0] + ']' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def written(path: Path, kept: Path, rows: int = 6, length: int = 24, seed: int = 0) -> torch.Tensor:
    kept.mkdir(exist_ok=True)
    return own_text(Source.parse(str(path)), rows, length, seed, CPU, kept, silent)


CONFIG = "tokenizer_config.json"


def beginning_with_bos(path: Path) -> Path:
    """Let the tokenizer put BOS before every text, as those of Llama do."""
    text = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*text, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    processor = {"type": "TemplateProcessing", "single": text, "pair": pair, "special_tokens": special}
    return edit(path, "tokenizer.json", post_processor=processor)


def always(model: Any, *tokens: int) -> None:
    """Let a model say these tokens in turn, whatever it reads."""
    head = model.lm_head
    head.weight.data.zero_()
    head.bias = torch.nn.Parameter(torch.full((head.weight.shape[0],), -1e4))
    head.bias.data[list(tokens)] = 0.0


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        (beginning_with_bos, {1}),
        (lambda path: edit(path, CONFIG, eos_token="<s>"), {1}),  # as GPT-2's, which puts nothing before a text
        (without_tokenizer, {7}),
        (lambda path: path, None),
    ],
    ids=["BOS before texts", "BOS between texts", "no tokenizer", "any token: a chat model's BOS may open turns alone"],
)
def test_rows_begin_as_texts_do_and_are_the_same_for_a_seed(
    change: Callable[[Path], Path], starts: set[int] | None, checkpoint: Make, tmp_path: Path
) -> None:
    source = change(checkpoint("llama", bos_token_id=7 if starts == {7} else 1))
    first = written(source, tmp_path / "a")
    assert (first.shape, first.dtype) == ((6, 24), torch.int64)
    found = set(first[:, 0].tolist())
    assert found == starts if starts else len(found) > 1
    assert int(first.max()) < Voice.of(Source.parse(str(source))).known, "ids beyond the tokenizer's have no text"
    assert torch.equal(first, written(source, tmp_path / "b"))
    assert not torch.equal(first, written(source, tmp_path / "c", seed=1))
    assert len({tuple(row) for row in first.tolist()}) == 6
    assert written(source, tmp_path / "short", length=4).shape == (6, 4)


def test_a_batch_that_was_kept_is_not_written_again(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint("llama")
    monkeypatch.setattr(writing, "ROWS", 4)
    whole, write, seen = written(source, tmp_path / "whole"), writing._Writer.written, list[int]()

    def stopped(self: Any, first: int, chances: torch.Tensor) -> torch.Tensor:
        seen.append(first)
        if first == 4 and len(seen) == 2:
            raise KeyboardInterrupt
        return write(self, first, chances)

    monkeypatch.setattr(writing._Writer, "written", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(source, tmp_path / "parts")
    assert torch.equal(written(source, tmp_path / "parts"), whole)
    assert seen == [0, 4, 4]
    for file in (tmp_path / "parts").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert torch.equal(written(source, tmp_path / "parts"), whole), "damaged files do not count"


def test_how_many_rows_are_written_at_once_changes_nothing(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    monkeypatch.setattr(writing, "rough", lambda device: torch.float32)  # in bfloat16 rows of other batches round otherwise
    whole = written(source, tmp_path / "whole")
    monkeypatch.setattr(writing, "ROWS", 1)
    assert torch.equal(written(source, tmp_path / "single"), whole)


@pytest.mark.parametrize("start", [1, None])
def test_a_text_that_ends_is_followed_by_another(start: int | None) -> None:
    """By the token that begins texts, or by one that is drawn."""
    model = tiny_model(tiny_config("llama"))
    always(model, 2, 5)
    writer, begins = writing._Writer(model, Voice(start, frozenset({2}), None, 96), 40), {start} if start else {7, 8, 9}
    writer._starts = torch.tensor([7, 8, 9])
    rows = writer.written(0, torch.rand(4, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    ends = (rows[:, :-1] == 2).nonzero().tolist()
    assert {int(rows[row, place + 1]) for row, place in ends} == begins
    assert set(rows[:, 0].tolist()) <= begins
    assert len(ends) + 4 == sum(int((rows == token).sum()) for token in begins)


def test_turns_follow_the_template(checkpoint: Make) -> None:
    source = Source.parse(str(edit(checkpoint("llama"), CONFIG, chat_template=TEMPLATE)))
    tokenizer = source.tokenizer()
    turns = Voice.of(source).turns
    assert tokenizer.decode(turns.opening).replace(" ", "") == "<s>[u]"
    assert tokenizer.decode(turns.answer).replace(" ", "") == "</s>[a]"
    model = tiny_model(tiny_config("llama"))
    always(model, 2, 50, 51, 52)
    rows = writing._Writer(model, Voice.of(source), 60).written(0, torch.rand(8, 60, dtype=torch.float64))
    for plain, talk in zip(rows[::2].tolist(), rows[1::2].tolist(), strict=True):
        assert tuple(talk[: len(turns.opening)]) == turns.opening
        assert tuple(plain[: len(turns.opening)]) != turns.opening
        ends = [place for place, token in enumerate(talk[:-8]) if token == 2]
        for place, wanted in zip(ends, (turns.answer, turns.reply, turns.answer), strict=False):
            assert tuple(talk[place : place + len(wanted)]) == wanted, "the end of a turn is said once"


UNUSED = "the chat template cannot be used, so the model writes no conversations: "
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tokens", "said"),
    [
        ("{{ nothing.here() }}", 331, UNUSED),
        ("{{ messages[0]['content'] }}", 331, UNUSED),
        ("{% broken", 331, UNUSED),
        (ENDLESS, 331, f"{UNUSED}it takes more than 3 seconds"),
        ("{{ 'a' * 2 ** 40 }}", 331, f"{UNUSED}MemoryError"),
        (TEMPLATE, 40, "the chat template has tokens that the model does not know, so it writes no conversations"),
    ],
)
def test_a_template_that_cannot_be_used_is_said_and_not_used(
    template: str,
    tokens: int,
    said: str,
    checkpoint: Make,
    warned: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_LONGEST", 3 if template == ENDLESS else writing._LONGEST)
    source = edit(checkpoint("llama", vocab_size=tokens, pad_token_id=None), CONFIG, chat_template=template)
    assert Voice.of(Source.parse(str(source))).turns is None
    (found,) = warned()
    assert found.startswith(said)
    if template != ENDLESS:
        assert int(written(source, tmp_path / "kept").max()) < tokens


def test_a_template_without_an_opening_begins_with_bos(checkpoint: Make, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ '</s>' }}{% endfor %}"
    source = edit(beginning_with_bos(checkpoint("llama")), CONFIG, chat_template=template)
    turns = Voice.of(Source.parse(str(source))).turns
    assert turns == Turns((), (2,), (2,))
    assert set(written(source, tmp_path / "kept")[:, 0].tolist()) == {1}


def test_a_template_that_names_the_day_says_the_same_every_day(checkpoint: Make) -> None:
    source = edit(checkpoint("llama"), CONFIG, chat_template="{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    tokenizer = Source.parse(str(source)).tokenizer()
    turns = Turns.of(tokenizer)
    assert tokenizer.decode(turns.opening).replace(" ", "").startswith("01Jan2026")


def test_one_word_again_and_again_is_no_text(checkpoint: Make) -> None:
    source = checkpoint("gpt_neox", tie_word_embeddings=False)
    with pytest.raises(Failure, match=r"writes the same few tokens again and again: 2\.0 different ones") as caught:
        writing._require_words(Source.parse(str(source)), torch.tensor([[4, 5] * 8]))
    assert "--text FILE" in str(caught.value.hint)
    writing._require_words(Source.parse(str(source)), torch.arange(16).view(2, 8))


def test_logits_that_are_not_finite_fail(checkpoint: Make, tmp_path: Path) -> None:
    model: Any = tiny_model(tiny_config("llama"))
    model.lm_head.weight.data[5] = torch.nan
    source = checkpoint("llama")
    model.save_pretrained(source)
    with pytest.raises(Failure, match=r"logits of .* are not finite"):
        written(source, tmp_path / "kept")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "bloom", "gemma2"])
def test_families_write(model_type: str, checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a latent, with ALiBi, windows and caps."""
    monkeypatch.setattr(writing, "_LEAST_WORDS", 0.0)  # a random Gemma repeats what it has read
    assert written(checkpoint(model_type), tmp_path / "kept", rows=3, length=12).shape == (3, 12)
