"""Text of users and files on a terminal, in Markdown and in a shell."""

import os
import re
import shutil
import subprocess
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.terminal.text import markdown, printable, printable_lines, shell_line, table

HOSTILE = "a\nb\r\x1b[31m\x07\u202e\u2066\u200f\x85\u2028\u00ad\udce9`|<b>*x*[l](u)"


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_nothing_that_steers_a_terminal_is_printed(text: str) -> None:
    for shown in (printable(text), markdown(text), printable_lines(text).replace("\n", " ")):
        assert shown.isprintable()
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
        shown.encode()  # a file or a pipe takes it
    assert len(printable(text)) == len(text)
    assert printable_lines(text).count("\n") == text.count("\n")


ESCAPED = {
    "llama-2-7b_gqa8.v1": "llama-2-7b_gqa8.v1",
    "größe_é_x 日本語 🦙": "größe_é_x 日本語 🦙",
    "_x_ __y__ a_ _b": r"\_x\_ \_\_y\_\_ a\_ \_b",
    "`code` *bold* ~no~": r"\`code\` \*bold\* \~no\~",
    "[a](b) ![c](d) <script>": r"\[a\](b) !\[c\](d) \<script\>",
    "a|b a\\b $x^2$": r"a\|b a\\b \$x^2\$",
    "&lt; &#60; R&D": r"\&lt; \&#60; R&D",
    "C# # #1": r"C# \# \#1",
    "two\nlines": "two lines",
}


@pytest.mark.parametrize("text", ESCAPED)
def test_markup_is_escaped_where_it_is_markup(text: str) -> None:
    assert markdown(text) == ESCAPED[text]
    assert re.sub(r"\\(.)", r"\1", ESCAPED[text]) == printable(text), "nothing is lost"


def test_a_table_of_hostile_cells_keeps_its_shape() -> None:
    shown = table(["model", HOSTILE], [[HOSTILE, "1"], ["b", HOSTILE]], right=[1])
    lines = shown.split("\n")
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["convert", "gqa", "a b", "--groups", "8"], "convert gqa 'a b' --groups 8"),
        (["it's"], "'it'\"'\"'s'"),
        (["a\nb"], r"$'a\x0ab'"),
        (["a\n'\\"], r"$'a\x0a\'\\'"),
        (["\u202e"], r"$'\xe2\x80\xae'"),
        (["\udce9.txt"], r"$'\xe9.txt'"),
        (["```"], "'```'"),
    ],
)
def test_a_command_is_one_printable_line(words: list[str], line: str) -> None:
    assert shell_line(words) == line


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12), min_size=1, max_size=4)
)
def test_bash_reads_a_command_back(words: list[str]) -> None:
    line = shell_line(words)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
