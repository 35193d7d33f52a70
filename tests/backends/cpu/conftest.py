"""Every instruction set in turn; without a library these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from linattn.backends.cpu import library


def _unusable() -> str | None:
    try:
        library.loaded()
    except library.LibraryError as error:
        return f"the CPU backend can't run: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := _unusable():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(params=library.LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, forced as a user would."""
    monkeypatch.setenv("LINATTN_CPU_ISA", request.param)
    if why := _unusable():
        pytest.skip(why)
    assert library.LEVELS[library.loaded().level] == request.param
    return request.param
