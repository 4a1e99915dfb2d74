"""What the tests of the exercises share, one file for each chapter.

Each writes the mistakes of its chapter anew, as a reader would, with loops and other names than the
package's own declaration of the mistake has.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lesson_code.checks import check_exercise


@pytest.fixture
def refused() -> Callable[..., str]:
    """A function that hands parts in and looks for words and a section in the refusal."""

    def refuse(label: str, words: str, section: str, **parts: object) -> str:
        with pytest.raises(AssertionError) as refusal:
            check_exercise(label, **parts)
        message = str(refusal.value)
        assert message.startswith(f"{label}: ")
        assert words in message
        assert f'Look at "{section}"' in message
        return message

    return refuse
