"""Environments for releases of torch are made one ahead, and none is left behind."""

import threading
from pathlib import Path

import pytest

from ci.environments import Broke, one_ahead


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def made(folder):
    """The releases whose environments are there."""
    return sorted(path.name for path in folder.glob("torch-*/*"))


def test_the_next_is_made_while_one_is_in_use_and_never_more_than_that(temporary):
    begun = {version: threading.Event() for version in "abc"}

    def make(version, home):
        home.mkdir()
        begun[version].set()
        return home / "python"

    environments = one_ahead("abc", make)
    assert next(environments).result().parent.name == "a"
    assert begun["b"].wait(10)
    assert not begun["c"].is_set()
    assert next(environments).result().parent.name == "b"
    assert begun["c"].wait(10)
    assert made(temporary) == ["b", "c"]
    assert next(environments).result().parent.name == "c"
    assert made(temporary) == ["c"]
    assert list(environments) == []
    assert list(temporary.iterdir()) == []


def test_one_that_cannot_be_made_costs_no_other(temporary):
    def make(version, home):
        home.mkdir()
        if version == "a":
            raise Broke("no such release")
        return home

    environments = one_ahead("ab", make)
    with pytest.raises(Broke, match="no such release"):
        next(environments).result()
    assert next(environments).result().name == "b"


def test_who_stops_leaves_none_not_even_the_next(temporary):
    begun, may_end = threading.Event(), threading.Event()

    def make(version, home):
        if version == "b":
            begun.set()
            may_end.wait(10)
        home.mkdir()
        return home

    environments = one_ahead("ab", make)
    next(environments).result()
    assert begun.wait(10)
    threading.Timer(0.1, may_end.set).start()
    environments.close()
    assert list(temporary.iterdir()) == []


def test_what_is_kept_stays_where_it_was_asked_for(temporary, tmp_path):
    def make(version, home):
        home.mkdir()
        return home

    kept: list[Path] = [each.result() for each in one_ahead("ab", make, keep=tmp_path)]
    assert all(path.is_dir() for path in kept)
