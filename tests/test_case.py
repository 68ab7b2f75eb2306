"""A case is declared once: its ids, its facets, and the hash that says what was measured."""

import re

import pytest
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.case import Facet, program_hash

from tests.runs import Little

pytestmark = pytest.mark.timeout(600)


def declared(claim="family.claim", *, level=MUST, source="here", **more):
    @case(claim, level=level, source=source, **more)
    def test_program(rank):
        """The claim, told
        in two lines.

        And more of it.
        """

    return test_program.case


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({}, {"family.claim": 2}),
        ({"world": 3}, {"family.claim": 3}),
        ({"world": (2, 4)}, {"family.claim/w2": 2, "family.claim/w4": 4}),
        ({"each": {"a": 1, "b": 2}}, {"family.claim/a": 2, "family.claim/b": 2}),
        (
            {"each": {"a": 1, "b": 2}, "world": (2, 3)},
            {"family.claim/a_w2": 2, "family.claim/a_w3": 3, "family.claim/b_w2": 2, "family.claim/b_w3": 3},
        ),
        ({"group": False}, {"family.claim": 1}),
        ({"group": False, "each": {"a": 1}}, {"family.claim/a": 1}),
    ],
)
def test_facets_make_ids_and_worlds(more, ids):
    known = declared(**more)
    assert {known.id(facet): facet.world for facet in known.facets()} == ids


def test_the_sentence_is_the_first_paragraph():
    assert declared().sentence == "The claim, told in two lines."
    assert declared().family == "family"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"claim": "Family.claim"}, "claim 'Family.claim' is not of the form family.name"),
        ({"claim": "claim"}, "is not of the form family.name"),
        ({"claim": "a.b.c"}, "is not of the form family.name"),
        ({"level": "SHOULD"}, "level 'SHOULD' is none of MUST, OBSERVED, HAZARD"),
        ({"source": ""}, "a case names its source"),
        ({"each": {"half MiB": 1}}, "facet names are [a-z0-9_]+"),
        ({"may": ("leave",)}, "may permits ['die', 'hang']"),
        ({"of": "numpy"}, "of is 'subject' or 'torch'"),
        ({"group": False, "world": 3}, "without a process group there is one process"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_by_name(more, why):
    with pytest.raises(ValueError, match=re.escape(why)) as refusal:
        declared(**{"claim": "family.claim", **more})
    assert "test_program" in str(refusal.value)


def test_a_case_without_a_sentence_is_refused():
    with pytest.raises(ValueError, match="begins with its claim in one sentence"):

        @case("family.claim", level=HAZARD, source="here")
        def test_program(rank):
            pass


MODULE = '''\
"""A module."""

import torch

from ddp_conformance import MUST, case


def helper(rank):
    """Helps."""
    return 1  # one


@case("family.claim", level=MUST, source="here", group=False)
def test_claim(rank):
    """A sentence."""
    rank.law("one", helper(rank), 1)
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""A module."""', '"""Another\nmodule."""', True),
        ('    """Helps."""\n', "", True),
        ("  # one", "", True),
        ("\n\n\n", "\n\n\n# A comment.\n\n\n", True),
        ('"""A sentence."""', '"""Another sentence."""', True),
        ("return 1", "return 2 - 1", False),
        ('"one"', '"two"', False),
        ("import torch\n", "import torch as t\n", False),
        ("group=False", "group=True", False),
    ],
)
def test_the_hash_ignores_docstrings_and_comments_and_nothing_else(tmp_path, old, new, same):
    def measured(name, text):
        path = tmp_path / name
        path.write_text(text)
        space = {}
        exec(compile(text, str(path), "exec"), space)
        return program_hash(space["test_claim"].case, Facet("", 1))

    assert old in MODULE
    assert (measured("old.py", MODULE) == measured("new.py", MODULE.replace(old, new, 1))) is same


def test_the_hash_knows_the_facet():
    known = declared(world=(2, 3))
    assert len({program_hash(known, facet) for facet in known.facets()}) == 2


SUITE = '''\
"""Cases to select from."""

from ddp_conformance import HAZARD, MUST, case


@case("one.plain", level=MUST, source="here", group=False)
def test_plain(rank):
    """A plain one."""
    rank.law("one", 1, 1)


@case("one.faceted", level=HAZARD, source="here", group=False, each={"a": 1, "b": 2})
def test_faceted(rank, value):
    """A faceted
    one."""
    rank.law("one", 1, 1)


@case("two.plain", level=MUST, source="here", group=False)
def test_other(rank):
    """Another family."""
    rank.law("one", 1, 1)


def test_ordinary():
    pass
'''


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    suite = Little(tmp_path_factory.mktemp("case") / "suite")
    suite.write("test_suite.py", SUITE)
    return suite


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        (("--claim=one",), ["one.plain", "one.faceted/a", "one.faceted/b"]),
        (("--claim", "one.faceted"), ["one.faceted/a", "one.faceted/b"]),
        (("--claim", "one.faceted/b", "--claim=two"), ["one.faceted/b", "two.plain"]),
        ((), ["one.plain", "one.faceted/a", "one.faceted/b", "two.plain"]),
    ],
)
def test_claim_selects_by_family_claim_and_case_and_list_tells_what(little, asked, ids):
    run = little.run("--list", *asked)
    sentences = {
        "one.plain": "MUST  A plain one.",
        "one.faceted/a": "HAZARD  A faceted one.",
        "one.faceted/b": "HAZARD  A faceted one.",
        "two.plain": "MUST  Another family.",
    }
    assert run.exit == 0, run.output
    assert [line for line in run.output.splitlines() if re.match(r"(one|two)\.", line)] == [
        f"{name}  {sentences[name]}" for name in ids
    ]
    assert not run.record.exists()


def test_claim_runs_what_it_selects(little):
    run = little.run("--claim=one.faceted")
    assert list(run.verdicts) == ["one.faceted/a", "one.faceted/b"]
    assert run.counts == {"failed": 2, "deselected": 3}
