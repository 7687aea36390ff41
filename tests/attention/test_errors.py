"""Errors are one line, whatever names they carry."""

import pytest

from attention.errors import Failure, KvfoldError, Refusal, one_line


@pytest.mark.parametrize("kind", [Refusal, Failure])
def test_nothing_in_an_error_reaches_a_terminal_raw(kind: type[KvfoldError]) -> None:
    error = kind("tensor a\x1b[31m\n lacks é → 12 %", hint="see \u202efile\udce9")
    assert str(error) == "tensor a\\x1b[31m\\n lacks é → 12 %"
    assert error.hint == "see \\u202efile\\udce9"
    assert kind("plain").hint is None


def test_an_error_of_others_becomes_one_short_line() -> None:
    assert one_line(ValueError("a  tensor\n\tis\nlost")) == "a tensor is lost"
    assert one_line(ValueError("\x1b[1mthis file\x1b[0m is damaged")) == "this file is damaged"
    assert one_line(ValueError("long " * 100), 7) == "long lo"
