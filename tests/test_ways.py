"""However a suite is started, its record says the same; where a part of it was asked for, that part."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from ddp_conformance import record

from tests.runs import Little

pytestmark = pytest.mark.timeout(600)

CASES = '''\
"""Cases with every verdict that a run in order can give."""

from ddp_conformance import MUST, OBSERVED, case


@case("family.held", level=MUST, source="here", each={f"n{i}": i for i in range(6)}, group=False)
def test_held(rank, number):
    """One law holds."""
    rank.show("number", number)
    rank.law("one is one", 1, 1)


@case("family.broken", level=MUST, source="here", world=2)
def test_broken(rank):
    """One law is broken on one rank."""
    rank.law("one is two", 1, 1 + rank.index)


@case("family.known", level=MUST, source="here", group=False)
def test_known(rank):
    """One law is known to be broken."""
    rank.law("two is one", 2, 1)


@case("family.lane", level=MUST, source="here", lanes=("none:*",))
def test_lane(rank):
    """Needs a lane that is not there."""


@case("family.absent", level=OBSERVED, source="here", needs=("torch.no_such_thing",), group=False)
def test_absent(rank):
    """Needs what torch has not."""
'''
GOLDEN = "".join(f'["held/n{i}"]\nnumber = "{i}"\nlaws = 1\n' for i in range(6))
GOLDEN += """
[broken]
laws = 1
[known]
laws = 1
[[known.broken]]
since = "1.13"
law = "two is one"
note = "of this test"
[absent]
offered = { "1.13" = "no" }
"""
VERDICTS = {
    **{f"family.held/n{i}": "holds" for i in range(6)},
    "family.broken": "violated",
    "family.known": "known",
    "family.lane": "no data",
    "family.absent": "not offered",
}

SHUFFLE = '''\
"""Cases in another order in each run, the same in all workers of a run."""

import os
import random


def pytest_addoption(parser):
    parser.addini("shuffle_seed", "for the order of cases")


def pytest_collection_modifyitems(config, items):
    random.Random(config.getini("shuffle_seed")).shuffle(items)
'''

CHOOSY = '''\
"""Leaves out two cases, and says so only by leaving them out."""


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.name.partition("[")[0] not in ("test_broken", "test_known")]
'''

SAME = {
    "-n0": ("-n0",),
    "-n1": ("-n1",),
    "-n2 in random order": ("-n2", "-p", "shuffle", "-o", "shuffle_seed=1"),
    "-n8": ("-n8",),
    "in random order, without a cache": ("-p", "shuffle", "-o", "shuffle_seed=2", "-p", "no:cacheprovider"),
}
PARTS = {
    "-k": (("-k", "held and n1 or known"), {"family.held/n1", "family.known"}),
    "--deselect": (("--deselect=test_family.py::test_broken",), VERDICTS.keys() - {"family.broken"}),
    "-x": (("-x", "-n2"), None),
    "what another plugin leaves": (("-p", "choosy", "-n2"), VERDICTS.keys() - {"family.broken", "family.known"}),
}
EVERY_TIME = ("-n0", "in random order, without a cache", "what another plugin leaves")
"""The others take eighteen rank servers at once, each of which imports torch: they are run by `-m long`."""


def ways(names):
    return [pytest.param(name, marks=[] if name in EVERY_TIME else pytest.mark.long) for name in names]


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    little = Little(tmp_path_factory.mktemp("ways") / "suite")
    little.write("test_family.py", CASES)
    little.write("golden/family.toml", GOLDEN)
    little.write("shuffle.py", SHUFFLE)
    little.write("choosy.py", CHOOSY)
    return little


@pytest.fixture(scope="module")
def runs(little, request):
    """All nine of them side by side, in one folder."""
    started = {**SAME, **{name: arguments for name, (arguments, _) in PARTS.items()}}
    if "long" not in request.config.option.markexpr:
        started = {name: started[name] for name in EVERY_TIME}
    with ThreadPoolExecutor(len(started)) as pool:
        return dict(zip(started, pool.map(lambda arguments: little.run(*arguments), started.values()), strict=True))


@pytest.mark.parametrize("how", ways(SAME))
def test_the_record_is_whole_and_the_same_however_the_suite_is_run(runs, how):
    run = runs[how]
    assert run.exit == 1, run.output
    assert run.verdicts == VERDICTS, run.output
    assert record.read(run.record).whole_suite
    assert record.canonical(record.read(run.record)) == record.canonical(record.read(runs["-n0"].record))


def test_random_order_is_another_order(runs):
    def order(how):
        return [line["id"] for line in record.read(runs[how].record).cases]

    assert order("in random order, without a cache") != order("-n0")


@pytest.mark.parametrize("how", ways(PARTS))
def test_a_part_of_the_suite_is_never_whole(runs, how):
    run = runs[how]
    part = PARTS[how][1]
    assert part is None or run.verdicts.keys() == part, run.output
    assert run.verdicts.items() <= VERDICTS.items()
    assert not record.read(run.record).whole_suite
    assert "no case answers" not in run.output, "what was left out has golden tables all the same"


@pytest.mark.long
def test_stopped_early_the_record_says_how_many_cases_there_are(runs):
    assert record.read(runs["-x"].record).end["collected"] == len(VERDICTS)


@pytest.mark.long
def test_the_last_failed_are_run_again_and_are_never_whole(runs, little):
    run = little.run("--lf")
    assert run.verdicts == {"family.broken": "violated"}
    assert not record.read(run.record).whole_suite
