"""A program that is not installed: the tests that need it skip with the reason, or fail where nothing may be skipped."""

from __future__ import annotations

import pytest
from programs import absent, skip


def test_a_missing_program_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch):
    assert absent("sh", "no-such-program") == ["no-such-program"]
    monkeypatch.delenv("PROTPERF_TESTS_SKIP_NOTHING", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such program"):
        skip("no such program")
    monkeypatch.setenv("PROTPERF_TESTS_SKIP_NOTHING", "1")
    with pytest.raises(pytest.fail.Exception, match="no such program"):
        skip("no such program")
