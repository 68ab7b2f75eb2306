"""What a golden file says is in force: by release, by lane, and told in a difference that a stranger can act on."""

from pathlib import Path

import pytest
from ddp_conformance import golden
from ddp_conformance.golden import GoldenError
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

TABLES = {
    "x": {
        "plain": "a",
        "by_release": {"1.13": "a", "2.4": "b", "2.9.1": False, "2.15": ["c", "d"]},
        "laws": 2,
        "offered": {"1.13": "no", "2.0": "yes"},
        "lane": {"nccl:cuda": {"by_release": {"2.9": "n"}, "offered": "yes"}},
        "broken": [
            {"since": "2.4", "until": "2.9", "law": "one", "link": "a/b#1"},
            {"since": "2.4", "outcome": "SIGSEGV", "lane": "gloo:cpu", "note": "n"},
        ],
        "note": [{"since": "2.4", "text": "why", "link": "a/b#2"}],
    }
}


@pytest.mark.parametrize(
    ("torch", "value"),
    [
        ("1.12.1", None),
        ("1.13.0", ("a", "1.13")),
        ("2.3.1+cu121", ("a", "1.13")),
        ("2.4.0", ("b", "2.4")),
        ("2.4.0.dev20260101", ("b", "2.4")),
        ("2.4.0rc1+cpu", ("b", "2.4")),
        ("2.9.0", ("b", "2.4")),
        ("2.9.1", None),
        ("2.10.0", None),
        ("2.15.0a0+git1234", (["c", "d"], "2.15")),
        ("3.0", (["c", "d"], "2.15")),
    ],
)
def test_the_newest_since_not_newer_than_torch_is_in_force(torch, value):
    known = golden.expected(TABLES, "x", "gloo:cpu", torch)
    assert known.facts.get("by_release") == value
    assert known.facts["plain"] == ("a", "")
    assert known.facts["laws"] == (2, "")
    assert known.known


def test_a_lanes_own_entry_beats_the_shared_one_whatever_its_since():
    assert "by_release" not in golden.expected(TABLES, "x", "nccl:cuda", "2.4.0").facts
    assert golden.expected(TABLES, "x", "nccl:cuda", "2.15.0").facts["by_release"] == ("n", "2.9")
    assert golden.expected(TABLES, "x", "nccl:cuda", "2.15.0").facts["plain"] == ("a", "")


def test_offered_is_a_fact_by_release_and_lane():
    assert not golden.expected(TABLES, "x", "gloo:cpu", "1.13.1").offered
    assert golden.expected(TABLES, "x", "gloo:cpu", "2.0.0").offered
    assert golden.expected(TABLES, "x", "nccl:cuda", "1.13.1").offered
    assert golden.expected(TABLES, "unheard of", "gloo:cpu", "2.0.0") == golden.Expected()


def test_broken_and_notes_are_in_force_inside_their_range_and_lane():
    def broken(lane, torch):
        return [each.what for each in golden.expected(TABLES, "x", lane, torch).broken]

    assert broken("gloo:cpu", "2.3.1") == []
    assert broken("gloo:cpu", "2.4.0") == ["law 'one'", "outcome SIGSEGV"]
    assert broken("nccl:cuda", "2.8.0") == ["law 'one'"]
    assert broken("gloo:cpu", "2.9.0") == ["outcome SIGSEGV"]
    assert golden.expected(TABLES, "x", "gloo:cpu", "2.3.1").notes == ()
    assert golden.expected(TABLES, "x", "gloo:cpu", "2.4.1").notes == ("since 2.4: why a/b#2",)


@given(st.tuples(*[st.integers(0, 30)] * 3), st.sampled_from(["", "rc1", ".dev20260101", "+cpu", "a0+git1f"]))
@settings(derandomize=True, deadline=None)
def test_a_release_is_compared_by_its_numbers_only(numbers, more):
    text = ".".join(map(str, numbers))
    assert golden.release(text + more) == golden.release(text)
    assert Version(".".join(map(str, golden.release(text)))) == Version(text)


WORTH = st.recursive(
    st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
KEYS = st.one_of(st.sampled_from(["broken", "note", "lane", "offered", "laws", "outcome", "fact"]), st.text(max_size=3))


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.dictionaries(KEYS, WORTH, max_size=4), WORTH), max_size=3))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_any_table_is_read_or_refused_in_one_line(tables):
    for name, table in tables.items():
        try:
            golden._check_table(Path("family.toml"), name, table)
        except GoldenError as error:
            assert str(error).startswith("family.toml: [")
        else:
            golden.expected(tables, name, "gloo:cpu", "2.13.0")


@given(st.binary(max_size=60))
@settings(derandomize=True, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(b'[x]\nfact = "' + content)
    try:
        golden.load(path)
    except GoldenError as error:
        assert str(error).startswith(f"{path}: ")


def test_a_file_that_is_not_there_has_no_tables(tmp_path):
    assert golden.load(tmp_path / "none.toml") == {}
