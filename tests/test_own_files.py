"""Names that a table of contents gives stay in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from protperf.formats import FormatError
from protperf.formats.own_files import check_names


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "../a", "a/", "a\0b", "\ud800", "a\udfff", "a" * 256, "\u00e9" * 128]
)
def test_a_name_that_leads_to_no_file_of_the_folder_is_refused(name: str):
    with pytest.raises(FormatError, match=r"^m\.json: names a file .*; copy it again$"):
        check_names(Path("m.json"), ["a.h5", name], remedy="copy it again")


def test_names_of_files_are_taken():
    check_names(Path("m.json"), ["a.h5", "prot\u00e9ine", "a b", "...", "\udcff", "a" * 255], remedy="")
