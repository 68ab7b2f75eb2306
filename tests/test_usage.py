"""A run that cannot mean anything says so in one clear line, with pytest's own exit code for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from ddp_conformance import record

from tests.runs import Little

pytestmark = pytest.mark.timeout(600)  # the runs of a module start together, on a machine that may be busy

CASE = '''\
"""One case."""

from ddp_conformance import MUST, case


@case("{claim}", level=MUST, source="here", group=False, {more})
def test_{name}(rank):
    """One is one."""
    rank.law("one is one", 1, 1)
'''
USAGE, INTERRUPTED, FAILED, NO_TESTS = 4, 2, 1, 5

GOLDENS = {
    "not TOML": ("[plain\n", "not a TOML file: Expected ']' at the end of a table declaration (at line 1, column 7)"),
    "unquoted release": ("[plain]\nfact = { 1.13 = '1' }\n", '[plain] fact: releases are quoted: { "1.13" = ... }'),
    "no release": ("[plain]\nfact = { new = '1' }\n", "[plain] fact: 'new' is no release of torch"),
    "empty entry": ("[plain]\nfact = {}\n", "[plain] fact: an entry by release names at least one release"),
    "a number": ("[plain]\nfact = 1.5\n", "[plain] fact: a fact is a string, or one string per rank, not 1.5"),
    "no table": ("plain = 1\n", "[plain] : a golden file holds one table per case"),
    "law and outcome": (
        '[[plain.broken]]\nsince = "1.13"\nlaw = "a"\noutcome = "SIGSEGV"\nnote = "n"\n',
        "[plain] broken: an entry has either a law or an outcome",
    ),
    "no reference": (
        '[[plain.broken]]\nsince = "1.13"\nlaw = "a"\n',
        "[plain] broken: an entry has a link, or a note where nobody has reported it",
    ),
    "unknown key": (
        '[[plain.broken]]\nsince = "1.13"\nlaw = "a"\nnote = "n"\nsinc = "1.13"\n',
        "[plain] broken: unknown keys ['sinc']",
    ),
}


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    suite = Little(tmp_path_factory.mktemp("usage") / "suite")
    suite.write("test_plain.py", CASE.format(claim="family.plain", name="plain", more=""))
    suite.write("golden/family.toml", "[plain]\nlaws = 1\n")
    return suite


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A suite whose only case needs a lane that this run has not."""
    suite = Little(tmp_path_factory.mktemp("other") / "suite")
    suite.write("test_lane.py", CASE.format(claim="family.lane", name="lane", more='lanes=("none:*",)'))
    suite.write("test_ordinary.py", "def test_ordinary():\n    pass\n")
    return suite


REFUSED = {
    ("--lane=gloo",): "ERROR: --lane gloo: write backend:device, such as gloo:cpu",
    ("--lane=smoke:cpu",): "ERROR: --lane smoke:cpu: this torch has no backend smoke, only gloo",
    ("--lane=smoke:cpu", "-n2"): "ERROR: --lane smoke:cpu: this torch has no backend smoke, only gloo",
    ("--lane=gloo:npu",): "ERROR: --lane gloo:npu: this machine has no npu device that torch can use",
    ("--lane=twin:cpu", "--lane-import=no_such_module"): "No module named 'no_such_module'",
    ("--lane-import=no_such_module",): "No module named 'no_such_module'",
    ("--subject=no_such_module:ddp",): "ERROR: --subject no_such_module:ddp: no_such_module does not import",
    ("--subject=torch.nn:NoSuchName",): "ERROR: --subject torch.nn:NoSuchName: torch.nn has no NoSuchName",
    ("--subject=torch", "-n2"): "ERROR: --subject torch: write package.module:name",
    ("--subject=math:pi",): "ERROR: --subject math:pi: neither callable nor an object with a method wrap",
    ("--subject=deadly:ddp",): "ERROR: --subject deadly:ddp: its import ended the process with 7",
    ("--record=suite.jsonl",): "suite.jsonl: the file exists: name another, or remove it",
    ("--record=no/folder.jsonl",): "no/folder.jsonl: No such file or directory",
    ("--claim=family.plane",): "ERROR: no case matches --claim family.plane (did you mean family.plain?): see --list",
    ("--claim=nothing",): "ERROR: no case matches --claim nothing: see --list",
    (
        "--claim=family.plane",
        "-n2",
    ): "ERROR: no case matches --claim family.plane (did you mean family.plain?): see --list",
    (
        "--claim=family.plain",
        "--claim=family.plane",
    ): "ERROR: no case matches --claim family.plane (did you mean family.plain?): see --list",
    (
        "--claim=family.plain",
        "--claim=family.plane",
        "-n2",
    ): "ERROR: no case matches --claim family.plane (did you mean family.plain?): see --list",
    ("--claim=family.plain", "-k=zzz"): "ERROR: the other options leave no case of --claim family.plain",
    ("--record=",): "a folder: name it *.jsonl",
    ("--case-deadline=0",): "argument --case-deadline: '0' is no positive number of seconds",
    ("--case-deadline=nan",): "argument --case-deadline: 'nan' is no positive number of seconds",
    ("--golden=suite.jsonl",): "ERROR: --golden suite.jsonl: no such folder",
    ("--no-such-option",): "unrecognized arguments: --no-such-option",
}


@pytest.fixture(scope="module")
def refused(little):
    little.write("suite.jsonl", "a record of old")
    little.write("deadly.py", "import os\nos._exit(7)\n")
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(REFUSED, pool.map(lambda arguments: little.run(*arguments), REFUSED), strict=True))


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_a_usage_error_is_exit_4_and_one_line(little, refused, arguments):
    run = refused[arguments]
    assert run.exit == USAGE, run.output
    assert REFUSED[arguments] in run.output
    assert "Traceback" not in run.output
    assert (little.folder / "suite.jsonl").read_text() == "a record of old"


def test_a_lane_asked_for_by_name_in_which_nothing_was_judged_is_red(other):
    run = other.run("--lane=gloo:cpu")
    assert run.exit == FAILED
    assert "ERROR: --lane gloo:cpu was asked for and no case was judged in it" in run.output
    assert run.verdicts == {"family.lane": "no data"}


def test_looking_judges_nothing_and_is_no_error(other):
    with ThreadPoolExecutor(3) as pool:
        collected = pool.submit(other.run, "--collect-only", "-q")
        listed = pool.submit(other.run, "--list", "-n2")
        ordinary = pool.submit(other.run, "-k", "test_ordinary")
    assert (collected.result().exit, listed.result().exit, ordinary.result().exit) == (0, 0, 0)
    assert "family.lane  MUST  One is one.\n" in listed.result().output
    assert not collected.result().record.exists()


def test_a_duplicate_case_id_is_a_collection_error_that_names_both(little):
    copy = little.write("test_copy.py", CASE.format(claim="family.plain", name="copy", more=""))
    try:
        run = little.run()
    finally:
        copy.unlink()
    assert run.exit == INTERRUPTED
    assert "case id 'family.plain' is taken: " in run.output
    assert "test_copy.py::test_copy and " in run.output
    assert "test_plain.py::test_plain" in run.output


def test_a_golden_that_cannot_be_used_is_one_line_at_its_module(tmp_path):
    little = Little(tmp_path / "suite")
    for number, (text, _) in enumerate(GOLDENS.values()):
        little.write(f"test_m{number}.py", CASE.format(claim=f"f{number}.plain", name="plain", more=""))
        little.write(f"golden/f{number}.toml", text)
    little.write("test_latin.py", CASE.format(claim="f_latin.plain", name="plain", more=""))
    (little.folder / "golden/f_latin.toml").write_bytes('[plain]\nfact = "ü"\n'.encode("latin-1"))
    run = little.run()
    assert run.exit == INTERRUPTED
    assert run.counts == {"error": len(GOLDENS) + 1}
    assert "Traceback" not in run.output
    assert "golden/f_latin.toml: not a TOML file: 'utf-8' codec can't decode byte 0xfc in position 16" in run.output
    for number, (_, line) in enumerate(GOLDENS.values()):
        assert f"golden/f{number}.toml: {line}" in run.output


def test_a_golden_without_a_module_that_cannot_be_used_is_red_and_no_crash(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_plain.py", CASE.format(claim="family.plain", name="plain", more=""))
    little.write("golden/family.toml", "[plain]\nlaws = 1\n")
    little.write("golden/orphan.toml", "[plain\n")
    run = little.run()
    assert run.exit == FAILED, run.output
    assert "orphan.toml: not a TOML file" in run.output
    assert "INTERNALERROR" not in run.output
    assert run.verdicts == {"family.plain": "holds"}


def test_a_record_is_not_whole_where_a_module_does_not_import(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_plain.py", CASE.format(claim="family.plain", name="plain", more=""))
    little.write("golden/family.toml", "[plain]\nlaws = 1\n")
    little.write("test_typo.py", "def test_typo(:\n")
    run = little.run("-n2")
    assert run.exit == FAILED, run.output
    assert run.verdicts == {"family.plain": "holds"}
    assert not record.read(run.record).whole_suite
