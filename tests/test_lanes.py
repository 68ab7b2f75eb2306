"""Lanes are more than gloo on CPU: a second backend runs the cases, deviates in golden files, and is accepted."""

import json
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest
from ddp_conformance.lanes import Lane

from ci import accept
from tests.runs import Little

pytestmark = pytest.mark.timeout(600)

TWIN = ("--lane=twin:cpu", "--lane-import=tests.twin:register")

CASES = '''\
"""Cases that run in two lanes, and tell them apart."""

import torch.distributed as dist

from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import linear


@case("lanes.mean", level=MUST, source="here", world=(2, 3))
def test_mean(rank):
    """The mean, whatever the backend."""
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.show("gradient", model.weight.grad)
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("lanes.name", level=OBSERVED, source="here")
def test_name(rank):
    """The backend's name is a fact that differs between lanes."""
    rank.show("same", rank.world_size)
    rank.show("name", dist.get_backend())
    if dist.get_backend() == "gloo":
        rank.show("of_gloo", 1)


@case("lanes.twin_only", level=MUST, source="here", lanes=("twin:*",))
def test_twin_only(rank):
    """A case that one lane alone can show."""
    rank.law("the backend is the twin", dist.get_backend(), "twin")


@case("lanes.counted", level=OBSERVED, source="here")
def test_counted(rank):
    """Only a backend of torch's own counts its collectives."""
    dist.barrier()
    rank.show("some", rank.collectives() > 0)


@case("lanes.torch_itself", level=MUST, source="here", of="torch", group=False)
def test_torch_itself(rank):
    """What is the same in every lane runs in the first."""
    rank.law("one is one", 1, 1)


def program(rank):
    rank.show("backend", dist.get_backend())


def test_by_hand(ranks):
    observation = ranks(program, world=2)
    assert [rank.facts["backend"] for rank in observation.ranks] == [ranks.lane.backend] * 2
'''


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    suite = Little(tmp_path_factory.mktemp("lanes") / "suite")
    suite.write("test_lanes.py", CASES)
    return suite


def by_lane(run):
    """Verdicts by case id and lane; `Run.verdicts` knows one lane only."""
    cases = [line for line in map(json.loads, run.record.read_text().splitlines()) if line["line"] == "case"]
    return {(line["id"], line["lane"]): line["verdict"] for line in cases}


@pytest.fixture(scope="module")
def accepted(little):
    """Both lanes in one run, accepted, and run again: in both, under xdist, and in each alone."""
    both = ("--lane=gloo:cpu", *TWIN)
    first = little.run(*both)
    monkey = pytest.MonkeyPatch()
    monkey.delenv("CI", raising=False)
    assert accept.main([str(first.record), "--golden", str(little.folder / "golden")]) == 0
    monkey.undo()
    with ThreadPoolExecutor(2) as pool:
        ways = {"both": (*both, "-n2"), "twin": TWIN, "gloo": ("--lane=gloo:cpu",)}
        runs = {way: pool.submit(little.run, *arguments) for way, arguments in ways.items()}
        return {"first": first, **{way: run.result() for way, run in runs.items()}}


def test_without_golden_every_lane_is_told_apart(accepted):
    told = by_lane(accepted["first"])
    assert told.pop(("lanes.counted", "twin:cpu")) == "no data"
    assert set(told.values()) == {"changed"}
    assert len(told) == 9
    assert accepted["first"].counts == {"failed": 9, "skipped": 1, "passed": 2}


def test_accept_writes_what_is_shared_once_and_what_differs_by_lane(accepted, little):
    tables = tomllib.loads((little.folder / "golden" / "lanes.toml").read_text())
    assert tables["mean/w2"] == {"gradient": "[[3.0, 3.0]]", "laws": 1}
    own = tables["name"]["lane"]["twin:cpu"]
    assert {key: value for key, value in tables["name"].items() if key != "lane"} == {
        "same": "2",
        "name": "gloo",
        "of_gloo": "1",
    }
    assert own["name"] == "twin"
    assert list(own["of_gloo"].values()) == [False]
    assert set(own) == {"name", "of_gloo"}
    assert tables["twin_only"] == {"lane": {"twin:cpu": {"laws": 1}}}
    observed = tomllib.loads((little.folder / "golden" / "observed.toml").read_text())
    assert list(observed) == ["gloo:cpu", "twin:cpu"]


def test_with_golden_both_lanes_hold(accepted):
    run = accepted["both"]
    assert run.exit == 0, run.output
    told = by_lane(run)
    assert told.pop(("lanes.counted", "twin:cpu")) == "no data"
    assert set(told.values()) == {"holds"}
    assert ("lanes.torch_itself", "gloo:cpu") in by_lane(run)
    assert ("lanes.torch_itself", "twin:cpu") not in by_lane(run)


def test_a_lane_alone_is_judged_by_its_own_entries(accepted):
    assert accepted["twin"].exit == 0, accepted["twin"].output
    assert {lane for _, lane in by_lane(accepted["twin"])} == {"twin:cpu"}
    assert accepted["gloo"].exit == 0
    assert by_lane(accepted["gloo"])["lanes.twin_only", "twin:*"] == "no data"
    assert re.search(r"SKIPPED .*no data: needs lane twin:\*|1 skipped", accepted["gloo"].output)


def test_a_wrong_entry_of_one_lane_turns_that_lane_red(accepted, little):
    path = little.folder / "golden" / "lanes.toml"
    text = path.read_text()
    try:
        path.write_text(text.replace('name = "twin"', 'name = "triplet"'))
        run = little.run("--lane=gloo:cpu", *TWIN, "--claim=lanes.name")
    finally:
        path.write_text(text)
    assert by_lane(run) == {("lanes.name", "gloo:cpu"): "holds", ("lanes.name", "twin:cpu"): "changed"}
    assert "-name = triplet\n+name = twin" in run.output.replace("\nE   ", "\n")


@pytest.mark.parametrize(
    ("lane", "most"),
    [
        (Lane("gloo", "cpu"), None),
        (Lane("twin", "cpu"), None),
        (Lane("gloo", "cuda", 1), None),
        (Lane("nccl", "cuda", 2), 2),
        (Lane("xccl", "xpu", 4), 4),
    ],
)
def test_one_rank_has_one_device_unless_the_backend_shares_them(lane, most):
    assert lane.most_ranks() == most


def test_a_lane_is_admitted_by_any_of_the_patterns():
    assert Lane("gloo", "cpu").admitted_by(())
    assert Lane("gloo", "cpu").admitted_by(("nccl:*", "gloo:*"))
    assert not Lane("gloo", "cuda").admitted_by(("nccl:*", "*:cpu"))
