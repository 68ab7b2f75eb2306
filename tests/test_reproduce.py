"""What `ci.reproduce` prints is a script that runs by itself, with torch and nothing else."""

import builtins
import re
import subprocess
import symtable
import sys
from collections import Counter

import pytest
import torch
from ddp_conformance import golden
from ddp_conformance.subject import BUILDS, DEFAULT
from ddp_conformance.suite import golden_path

from ci import reproduce
from ci.cases import CONFORMANCE, ROOT, all_cases

LANE = "gloo:cpu"
SAMPLE = (
    "bucket_assignment.greedy",  # reference.py
    "no_sync.forward_decides",
    "firing.as_buckets_fill/w2",
    "unused_parameters.none_stays_none",
    "serialization.hook_lost/pickle",  # classes that must be found again under their module's name
    "delayed_all_reduce.broadcast",  # needs an option
    "buffers.rank_0_at_forward/default",
    "switches.process_group",  # three ranks, groups of its own
    "positional_matching.any_parameter/first",  # a group that has timed out
)


def script(name, folder, subject=DEFAULT):
    case, facet = reproduce.find(name)
    path = folder / f"{name.replace('/', '-')}.py"
    path.write_text(reproduce.script(case, facet, LANE, None, subject))
    return path


def run(*command):
    return subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, timeout=110)


def conforms(case, facet):
    """Whether there are laws, all hold on this torch, and every rank returns."""
    expected = golden.expected(
        golden.load(golden_path(case)), case.id(facet).partition(".")[2], LANE, torch.__version__
    )
    here = all(BUILDS[name]() for name in case.needs if name in BUILDS)
    lanes = not case.lanes or any(lane in (LANE, "gloo:*") for lane in case.lanes)
    ends = expected.broken or "outcome" in expected.facts or case.may
    return "laws" in expected.facts and expected.offered and lanes and here and not ends


def check(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": holds" in done.stdout and "BROKEN" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", SAMPLE)
def test_a_case_runs_standalone(name, tmp_path):
    check(run(str(script(name, tmp_path))))


def test_a_script_of_another_ddp_ends_with_1_where_it_breaks_a_law(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subject = "tests.mutants.mean_gradients:SumsGradients"
    done = run(str(script("mean_gradients.mean/w2", tmp_path, subject)))
    assert done.returncode == 1, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: law inside DDP a rank gets the mean: BROKEN" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_case_runs_under_torchrun(tmp_path):
    path = str(script("mean_gradients.mean/w3", tmp_path))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
    check(run(*launcher, "3", path))
    refused = run(*launcher, "2", path)
    assert refused.returncode != 0 and "this case is one of 3 ranks" in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("module", sorted(path.stem for path in CONFORMANCE.glob("test_*.py")))
def test_a_case_of_every_module_runs_standalone(module, tmp_path):
    facets = ((case, facet) for case in all_cases() if case.path.stem == module for facet in case.facets())
    chosen = next((case.id(facet) for case, facet in facets if conforms(case, facet)), None)
    if chosen is None:
        pytest.skip(f"torch {torch.__version__} offers nothing of this module that conforms")
    check(run(str(script(chosen, tmp_path))))


def test_every_case_is_complete_in_itself():
    """It compiles, imports nothing of the suite's, and names nothing that it does not define, twice least of all."""
    wrong = []
    for case in all_cases():
        facet = case.facets()[-1]
        text = reproduce.script(case, facet, LANE, None)
        if missing := undefined(text):
            wrong.append(f"{case.id(facet)}: undefined {sorted(missing)}")
        if twice := bound_twice(text):
            wrong.append(f"{case.id(facet)}: defined twice {sorted(twice)}")
        if re.search(r"^\s*(from|import) ddp_conformance", text, re.MULTILINE):
            wrong.append(f"{case.id(facet)}: imports the suite")
    assert not wrong, "\n".join(wrong)


def undefined(text):
    """The global names that are used somewhere, bound nowhere, and no builtins."""
    module = symtable.symtable(text, "script", "exec")
    bound = {symbol.get_name() for symbol in module.get_symbols() if not symbol.is_referenced() or symbol.is_local()}
    return global_names(module) - bound - set(dir(builtins)) - {"__name__"}


def global_names(scope):
    names = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return names.union(*(global_names(inner) for inner in scope.get_children()))


def bound_twice(text):
    names = re.findall(r"^(?:def |class )?([A-Za-z_]\w*)(?:\(|: .*?=|:| =)", text, re.MULTILINE)
    return [name for name, times in Counter(names).items() if times > 1]


def test_what_is_missing_or_bound_twice_is_found():
    assert undefined("import os\ndef f(x):\n    y = x\n    return y, os, g, [z for z in A]\n") == {"g", "A"}
    assert undefined("class A:\n    b: int = c\n") == {"c"}
    assert bound_twice("A = 1\ndef f():\n    A = 2\nA: int = 3\n") == ["A"]


HEADS = {
    ("no_sync.used_in_any_micro_batch/everywhere", "2.3.1"): (
        "On torch 2.3.1 it was measured: known: law 'b, used in no_sync only, is the mean': pytorch/pytorch#69031",
        "Expected of torch 2.3.1: a deviation that is on file.",
    ),
    ("no_sync.used_in_any_micro_batch/everywhere", "2.4.1"): (
        "On torch 2.4.1 it was measured: holds",
        "Expected of torch 2.4.1: the claim holds.",
        "since 2.4: the map of used parameters is kept inside no_sync, too pytorch/pytorch#124193",
    ),
    ("bucket_cap_list.one_by_one", "2.4.1"): (
        "On torch 2.4.1 it was measured: not offered: torch.nn.parallel:DistributedDataParallel has no bucket_cap_mb_list",
        "Expected of torch 2.4.1: it does not offer this.",
    ),
    ("outputs.static_unknown/object", "2.0.1"): ("    gradients on rank 1 = [4.0, 3.0, 3.0, 3.0]",),
}


@pytest.mark.parametrize(("name", "release"), HEADS)
def test_what_a_release_does_and_what_is_expected_of_it_is_told_in_the_head(name, release):
    case, facet = reproduce.find(name)
    head = reproduce.head(case, facet, LANE, release)
    assert [line for line in HEADS[name, release] if line not in head.splitlines()] == [], head
    assert "Traceback" not in head


@pytest.mark.parametrize("arguments", [["no.such"], ["mean_gradients.mean", "--torch", "0.1"]])
def test_what_is_unknown_is_one_clear_line(arguments, capsys):
    assert reproduce.main(arguments) == 2
    assert capsys.readouterr().err.startswith("ci.reproduce: ")


def test_a_case_that_is_mistyped_is_told_the_nearest(capsys):
    assert reproduce.main(["mean_gradients.men"]) == 2
    assert capsys.readouterr().err == "ci.reproduce: no case 'mean_gradients.men': did you mean mean_gradients.mean?\n"
