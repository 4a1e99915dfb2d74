"""A module with a skipped test; its name keeps it out of every run that does not ask for it."""

import pytest


def test_passes() -> None:
    pass


@pytest.mark.skip(reason="a canary: it must be reported")
def test_is_skipped() -> None:
    pass
