"""What a message quotes of a file."""

from __future__ import annotations

from protperf.formats import FormatError, one_line


def test_a_message_is_one_printable_line_whatever_it_quotes():
    said = str(FormatError("a\nb\x1b[31mc\0" + "\u202e" + "x" * 10**6 + "end"))
    assert said.isprintable()
    assert len(said) < 2100
    assert said.startswith(r"a\nb\x1b[31mc\x00\u202e")
    assert said.endswith("end")
    assert one_line("tab\there") == r"tab\there"
