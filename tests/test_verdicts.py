"""Every row of the design's verdict table is what pytest, its exit code, JUnit and the record all say."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.runs import Little

pytestmark = pytest.mark.timeout(600)  # the runs of a module start together, on a machine that may be busy

HEAD = '''\
"""Rows of the verdict table; the family is the verdict that its cases end with."""

import os
import signal
import sys

from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.subject import NoData, NotOffered


def one(rank):
    rank.show("fact", 1)
    rank.law("one is one", 1, 1)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()
'''

BODIES = {
    "holds.laws_hold": ("MUST", "group=False", "one(rank)"),
    "holds.by_facts_alone": ("OBSERVED", "group=False", 'rank.show("fact", 1)'),
    "holds.by_release": ("MUST", "world=2", "one(rank)"),
    "holds.permitted_death": ("HAZARD", 'group=False, may=("die",)', "one(rank)\n    die()"),
    "holds.permitted_hang": (
        "HAZARD",
        'group=False, may=("hang",)',
        "one(rank)\n    with rank.may_wait():\n        signal.pause()",
    ),
    "known.law": ("MUST", "group=False", 'rank.law("one is two", 1, 2)'),
    "known.death": ("MUST", "group=False", "one(rank)\n    die()"),
    "known.exception": ("MUST", "group=False", 'one(rank)\n    raise KeyError("x")'),
    "absent.lacking": ("MUST", 'group=False, needs=("torch.no_such_thing",)', "one(rank)"),
    "absent.in_the_middle": ("MUST", "group=False", 'one(rank)\n    raise NotOffered("no more")'),
    "nodata.lane": ("MUST", 'lanes=("none:*",)', "one(rank)"),
    "changed.fact": ("MUST", "group=False", "one(rank)"),
    "changed.fact_of_one_rank": ("MUST", "world=2", 'rank.show("fact", rank.index)\n    rank.law("one is one", 1, 1)'),
    "changed.number_of_laws": ("MUST", "group=False", "one(rank)"),
    "changed.no_golden": ("MUST", "group=False", "one(rank)"),
    "changed.fact_not_produced": ("MUST", "group=False", 'rank.law("one is one", 1, 1)'),
    "changed.fact_no_more_expected": ("MUST", "group=False", "one(rank)"),
    "changed.now_offered": ("MUST", "group=False", "one(rank)"),
    "changed.offered_no_more": ("MUST", 'group=False, needs=("torch.no_such_thing",)', "one(rank)"),
    "changed.known_with_other_facts": ("MUST", "group=False", 'rank.show("fact", 2)\n    rank.law("one is two", 1, 2)'),
    "violated.law": ("MUST", "group=False", 'rank.law("one is two", 1, 2)'),
    "violated.law_of_a_hazard": ("HAZARD", "group=False", 'rank.law("one is two", 1, 2)'),
    "violated.negative_law": ("MUST", "group=False", 'rank.differs("one is not one", 1, 1)'),
    "violated.raised": ("OBSERVED", "group=False", 'raise ValueError("of the program")'),
    "violated.hung": ("MUST", "group=False", "one(rank)\n    signal.pause()"),
    "violated.died": ("MUST", "group=False", "one(rank)\n    die()"),
    "violated.must_without_a_law": ("MUST", "group=False", 'rank.show("fact", 1)'),
    "violated.another_law": ("MUST", "group=False", 'rank.law("two is one", 2, 1)'),
    "violated.another_death": ("MUST", "group=False", "one(rank)\n    os._exit(3)"),
    "violated.before_it_is_not_offered": (
        "MUST",
        "group=False",
        'rank.law("one is two", 1, 2)\n    raise NotOffered("no more")',
    ),
    "violated.before_there_is_no_data": (
        "MUST",
        "world=2",
        'rank.law("one is two", 1, 1 + rank.index)\n    raise NoData("no more")',
    ),
    "violated.death_beside_one_not_offered": (
        "MUST",
        "world=2",
        'one(rank)\n    die() if rank.index else None\n    raise NotOffered("no more")',
    ),
    "violated.fixed_law": ("MUST", "group=False", "one(rank)"),
    "violated.fixed_death": ("MUST", "group=False", "one(rank)"),
}

GOLDEN = {
    "holds": """
        [laws_hold]
        fact = "1"
        laws = 1
        outcome = { "1.13" = "SIGSEGV", "2.0" = "returned" }
        [by_facts_alone]
        fact = "1"
        [by_release]
        fact = { "1.0" = "0", "1.13" = "1", "99.0" = "2" }
        laws = { "1.13" = 1, "99.0" = false }
        gone = { "1.0" = "1", "1.13" = false }
        [permitted_death]
        fact = "1"
        laws = 1
        outcome = "SIGSEGV"
        [permitted_hang]
        fact = "1"
        laws = 1
        outcome = "waiting"
        """,
    "known": """
        [law]
        laws = 1
        [[law.broken]]
        since = "1.13"
        until = "99.0"
        law = "one is two"
        link = "pytorch/pytorch#1"
        [death]
        fact = "1"
        laws = 1
        outcome = "SIGSEGV"
        [[death.broken]]
        since = "1.13"
        lane = "gloo:cpu"
        outcome = "SIGSEGV"
        note = "nobody has reported it"
        [exception]
        fact = "1"
        laws = 1
        outcome = "raised KeyError"
        [[exception.broken]]
        since = "1.13"
        outcome = "raised KeyError"
        link = "https://github.com/pytorch/pytorch/issues/3"
        """,
    "absent": """
        [lacking]
        offered = { "1.13" = "no", "99.0" = "yes" }
        [in_the_middle]
        offered = { "1.13" = "no" }
        """,
    "changed": """
        [fact]
        fact = "2"
        laws = 1
        [fact_of_one_rank]
        fact = ["0", "2"]
        laws = 1
        [number_of_laws]
        fact = "1"
        laws = 2
        [fact_not_produced]
        fact = "1"
        laws = 1
        [fact_no_more_expected]
        fact = { "1.0" = "1", "1.13" = false }
        laws = 1
        [now_offered]
        fact = "1"
        laws = 1
        offered = { "1.13" = "no" }
        [known_with_other_facts]
        fact = "1"
        laws = 1
        [[known_with_other_facts.broken]]
        since = "1.13"
        law = "one is two"
        note = "known"
        """,
    "violated": """
        [another_law]
        laws = 1
        [[another_law.broken]]
        since = "1.13"
        law = "one is two"
        note = "known"
        [another_death]
        [[another_death.broken]]
        since = "1.13"
        outcome = "SIGSEGV"
        note = "known"
        [fixed_law]
        fact = "1"
        laws = 1
        [[fixed_law.broken]]
        since = "1.13"
        law = "one is one"
        note = "known"
        [fixed_death]
        fact = "1"
        laws = 1
        [[fixed_death.broken]]
        since = "1.13"
        outcome = "SIGSEGV"
        note = "known"
        """,
}

BREAKS_OFF = '''\
"""A module that a rank cannot import: what happens before the program begins is no verdict on DDP."""

import sys

from ddp_conformance import MUST, case

if "pytest" not in sys.modules:
    raise OSError("no space left on device")


@case("error.before_the_program", level=MUST, source="here", group=False)
def test_before_the_program(rank):
    """Never begun."""
'''

VERDICT = {"absent": "not offered", "nodata": "no data", "error": "no data"}
OUTCOME = {
    "holds": "passed",
    "known": "xfailed",
    "absent": "skipped",
    "nodata": "skipped",
    "changed": "failed",
    "violated": "failed",
    "error": "error",
}
EXIT = {("holds", "known", "absent"): 0, ("nodata",): 1, ("changed",): 1, ("violated",): 1, ("error",): 1}
"""Of a run of these families alone. Cases of no data do not make a run red, but a run that judged nothing is."""

WHY = {
    "changed.fact": "-fact = 2\n+fact = 1",
    "changed.fact_of_one_rank": "-fact on rank 1 = 2\n+fact on rank 1 = 1",
    "changed.number_of_laws": "-laws = 2\n+laws = 1",
    "changed.no_golden": "no golden yet",
    "changed.fact_not_produced": "-fact = 1",
    "changed.fact_no_more_expected": "+fact = 1",
    "changed.now_offered": "golden says it is not",
    "changed.offered_no_more": "golden says it is offered",
    "changed.known_with_other_facts": "-fact = 1\n+fact = 2",
    "violated.law": "broken law: one is two\nrank 0:\n    got      1\n    expected 2",
    "violated.negative_law": "which it must not be",
    "violated.raised": "ValueError: of the program",
    "violated.hung": "rank 0: waiting",
    "violated.died": "rank 0: SIGSEGV",
    "violated.must_without_a_law": "no law ran",
    "violated.another_law": "broken law: two is one",
    "violated.another_death": "rank 0: exit 3",
    "violated.fixed_law": "fixed: set until",
    "violated.fixed_death": "fixed: set until",
    "violated.before_it_is_not_offered": "    expected 2\n\nno more",
    "violated.before_there_is_no_data": "broken law: one is two\nrank 1:",
    "violated.death_beside_one_not_offered": "rank 1: SIGSEGV",
    "error.before_the_program": "no space left on device",
    "absent.lacking": "not offered: this torch has no torch.no_such_thing",
    "nodata.lane": "no data: needs lane none:*",
    "known.law": "pytorch/pytorch#1",
    "known.death": "nobody has reported it",
}
ROWS = [*BODIES, "error.before_the_program"]


def module() -> str:
    cases = [HEAD]
    for name, (level, more, body) in BODIES.items():
        function = "test_" + name.replace(".", "_")
        cases.append(
            f'\n\n@case("{name}", level={level}, source="here", {more})\n'
            f'def {function}(rank):\n    """Sentence of {name}."""\n    {body}\n'
        )
    return "".join(cases)


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    suite = Little(tmp_path_factory.mktemp("verdicts") / "suite")
    suite.write("test_rows.py", module())
    suite.write("test_breaks_off.py", BREAKS_OFF)
    for family, text in GOLDEN.items():
        suite.write(f"golden/{family}.toml", text)
    return suite


@pytest.fixture(scope="module")
def runs(little):
    """The whole suite, with a stale golden table, and each family alone."""
    little.write("golden/removed.toml", '[gone]\nfact = "1"\n')
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(little.run, "--case-deadline=2")
        alone = {
            families: pool.submit(
                little.run, "--case-deadline=2", "-p", "no:cacheprovider", *map("--claim={}".format, families)
            )
            for families in EXIT
        }
        return {"whole": whole.result(), **{families: run.result() for families, run in alone.items()}}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_told_alike_everywhere(runs, name):
    run, family = runs["whole"], name.split(".")[0]
    assert run.verdicts[name] == VERDICT.get(family, family), run.output
    told = run.told[name]
    assert told.outcome == OUTCOME[family], run.output
    assert told.properties == {
        "claim": name,
        "level": BODIES.get(name, ("MUST",))[0],
        "verdict": VERDICT.get(family, family),
    }
    assert WHY.get(name, "") in told.message


@pytest.mark.parametrize("families", EXIT, ids=" ".join)
def test_families_alone_have_their_exit_code(runs, families):
    run = runs[families]
    rows = [name for name in ROWS if name.split(".")[0] in families]
    assert run.exit == EXIT[families], run.output
    assert sorted(run.verdicts) == sorted(rows)
    outcomes = Counter(OUTCOME[name.split(".")[0]] for name in rows)
    assert run.counts == {**outcomes, "deselected": len(ROWS) - len(rows)}


def test_a_failure_says_claim_source_and_how_to_accept_it(runs):
    message = runs["whole"].told["changed.fact"].message
    assert "changed.fact (MUST) changed\nclaim:  Sentence of changed.fact.\nsource: here" in message
    assert "python -m ci.accept" in message
    assert "python -m ci.accept" not in runs["whole"].told["violated.law"].message


def test_another_subject_is_told_of_what_torch_breaks_too_and_is_violated_all_the_same(little):
    claims = ("--claim=known", "--claim=violated.law")
    run = little.run("--subject=tests.reference_ddp:ReferenceDDP", *claims, "-p", "no:cacheprovider")
    assert {run.verdicts[name] for name in run.cases} == {"violated"}, run.output
    also = "torch's own DDP does so, too, on this release: "
    assert f"{also}pytorch/pytorch#1" in run.told["known.law"].message
    assert f"{also}nobody has reported it" in run.told["known.death"].message
    assert also not in run.told["violated.law"].message


def test_a_hung_rank_shows_its_stack(runs):
    message = runs["whole"].told["violated.hung"].message
    assert "rank 0 stack" in message
    assert "test_violated_hung" in message


def test_the_summary_counts_each_verdict_by_family_and_names_every_known(runs):
    output = runs["whole"].output
    assert "holds     5 holds\n" in output
    assert "known     3 known\n" in output
    assert "absent    2 not offered\n" in output
    assert "error     1 no data\n" in output
    assert "known: known.law [gloo:cpu] law 'one is two': pytorch/pytorch#1" in output
    assert "known: known.death [gloo:cpu] outcome SIGSEGV: nobody has reported it" in output


def test_a_stale_golden_table_is_red_in_full_collection_only(runs):
    assert "removed.toml: [gone]" in runs["whole"].told["stale golden tables"].message
    assert "removed.toml" not in runs["holds", "known", "absent"].output


def test_a_run_that_judged_nothing_is_red(runs):
    assert "ERROR: cases were selected and none was judged" in runs["nodata",].output


def test_last_failed_and_exitfirst_read_the_verdicts(runs, little):
    red = sum(OUTCOME[name.split(".")[0]] in ("failed", "error") for name in ROWS)
    run = little.run("--lf", "-x", "--case-deadline=2")
    assert f"rerun previous {red} failures" in run.output
    assert run.exit == 1
    assert run.counts["error"] + run.counts.get("failed", 0) == 1
    assert len(run.verdicts) == 1
    assert "stale golden" not in run.output
