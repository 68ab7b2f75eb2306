"""The kill matrix says which case caught what, and a failure for all that proves nothing; no rank is started here."""

import json
from itertools import pairwise

import pytest
from ddp_conformance.ranks import Observation, RankReport
from ddp_conformance.subject import DEFAULT, Subject

from ci import mutants, trials
from ci.cases import all_cases

CASES = '''"""Made up."""
from ddp_conformance import HAZARD, MUST, case

@case("means.mean", level=MUST, source="DistributedDataParallel", world=(1, 2))
def test_mean(rank):
    """The mean."""

@case("means.{other}", level=MUST, source="DistributedDataParallel"{needs})
def test_other(rank):
    """Another promise."""

@case("ends.hangs", level=HAZARD, source="DistributedDataParallel", may=("hang",))
def test_hangs(rank):
    """What happens."""

@case("ends.dies", level=HAZARD, source="DistributedDataParallel", may=("die",))
def test_dies(rank):
    """What happens."""
'''
EVERYWHERE = ("means.mean/w1", "means.mean/w2", "means.sum", "ends.hangs", "ends.dies")


class MadeUp(trials.Trials):
    """Ranks that say what `broken` and `outcomes` have for the subject and the case, and else that the law holds."""

    broken = {}
    outcomes = {}
    observed = []

    def observe(self, subject, shot, deadline):
        self.observed.append((subject, shot.id))
        outcome = self.outcomes.get((subject, shot.id), "returned")
        if outcome == "slow":
            outcome = "waiting" if deadline == trials.DEADLINE else "returned"
        law = ("the law", shot.id not in self.broken.get(subject, ()), "")
        report = RankReport(0, ready=True, outcome=outcome, laws=[law] * (outcome == "returned"))
        return Observation([report], broke_off="no space left" if outcome == "broke off" else None)


class Willing:
    """A subject that has whatever it is asked for."""

    def need(self, name):
        pass


def mutant(name, breaks, **more):
    return mutants.Mutant(f"tests.mutants.{name}", more.pop("base", DEFAULT), breaks, "the promise", "sources", **more)


MEAN = mutant("a:Mean", ("means.mean",))
SUM = mutant("a:Sum", ("means.sum",))


@pytest.fixture
def matrix(tmp_path, monkeypatch, capsys):
    """Run `python -m ci.mutants` on made-up mutants and cases, given what each breaks; its exit status and its lines."""

    def run(broken, *arguments, known=(MEAN, SUM), other="sum", needs="", outcomes=None, reasons=None):
        folder = tmp_path / other
        folder.mkdir(exist_ok=True)
        (folder / "test_made_up.py").write_text(CASES.format(other=other, needs=needs))
        monkeypatch.setattr(trials, "all_cases", lambda: all_cases(folder))
        monkeypatch.setattr(mutants, "find_mutants", lambda: list(known))
        monkeypatch.setattr(mutants, "load_reasons", lambda: reasons or {})
        monkeypatch.setattr(mutants, "Trials", MadeUp)
        monkeypatch.setattr(MadeUp, "broken", broken)
        monkeypatch.setattr(MadeUp, "outcomes", outcomes or {})
        monkeypatch.setattr(MadeUp, "observed", [])
        monkeypatch.setattr(trials, "_subject", lambda spec: Subject(DEFAULT) if spec == DEFAULT else Willing())
        always = ["--results", str(tmp_path / "results.jsonl"), "--jobs", "1"]
        return mutants.main([*always, *arguments]), capsys.readouterr().out.splitlines()

    return run


def failures(lines):
    return [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED")]


def test_all_is_well_when_every_case_catches_a_mutant_of_its_own(matrix):
    status, lines = matrix({MEAN.spec: ["means.mean/w2"], SUM.spec: ["means.sum"]})
    assert status == 0
    assert lines[:2] == ["a:Mean: 1 of 5: means.mean/w2", "a:Sum: 1 of 5: means.sum"]
    assert not failures(lines)


def test_a_survivor_and_an_idle_case_and_an_unbroken_law_are_a_line_each(matrix):
    status, lines = matrix({MEAN.spec: ["means.mean/w1"]})
    assert status == 1
    assert failures(lines) == [
        "a:Sum survives: the promise",
        "means.sum (test_other) catches no mutant",
        "no mutant breaks means.sum: the law",
    ]


def test_a_law_that_no_mutant_breaks_needs_a_reason_and_only_such_a_law(matrix):
    broken = {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.mean/w1", "means.sum"]}
    reasons = {"means.mean: the law": "why not", "means.sum: the law": "arithmetic"}
    _, lines = matrix(broken, reasons=reasons)
    taken_out = [f"a mutant does break {law}: take it out of unbroken.toml" for law in reasons]
    assert failures(lines) == taken_out
    _, lines = matrix({MEAN.spec: ["means.mean/w1"]}, known=(MEAN,), reasons={"means.sum: the law": "arithmetic"})
    assert "  means.sum: the law (arithmetic)" in lines
    assert failures(lines) == ["means.sum (test_other) catches no mutant"]


def test_a_mutant_that_only_other_claims_catch_fails(matrix):
    _, lines = matrix({MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.mean/w1"]})
    assert "a:Sum is caught by means.mean/w1, but by none of means.sum" in failures(lines)


def test_a_broad_mutant_makes_no_case_useful(matrix):
    _, lines = matrix({MEAN.spec: EVERYWHERE, SUM.spec: ["means.sum"]})
    assert "a:Mean: 5 of 5 (broad): means.mean/w1, means.mean/w2, means.sum, ends.hangs, ends.dies" in lines
    assert failures(lines) == ["means.mean (test_mean) catches no mutant"]


def test_one_that_is_at_large_is_tried_everywhere(matrix):
    known = (MEAN, mutant("a:Large", ("means.sum",), at_large=True))
    _, lines = matrix({MEAN.spec: ["means.mean/w1"]}, "--others", "0", known=known)
    assert "a:Mean: 1 of 3: means.mean/w1" in lines
    assert "a:Large: 0 of 5: SURVIVES" in lines


def test_more_of_the_others_are_those_that_fewer_had_and_some_more():
    shots = [shot for shot in trials.find_shots() if shot.case.family in ("no_sync", "join")]
    drawn = [[shot.id for shot in mutants.order_for(MEAN, shots, others)] for others in (1, 3, 7, 20, len(shots))]
    assert [len(ids) for ids in drawn[:-1]] == [1, 3, 7, 20]
    assert all(set(fewer) < set(more) for fewer, more in pairwise(drawn))


def test_what_the_original_breaks_is_no_kill_and_asked_of_nobody(matrix):
    broken = {DEFAULT: ["means.sum"], MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}
    _, lines = matrix(broken)
    assert failures(lines) == ["a:Sum survives: the promise"]
    assert any(line.startswith("not asked: means.sum, which torch ") for line in lines)


def test_a_law_that_the_original_did_not_reach_kills_nothing(matrix):
    for outcome in ("waiting", "raised RuntimeError", "broke off"):
        ends = {(DEFAULT, "means.sum"): outcome}
        _, lines = matrix({MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}, "--only", "Sum", outcomes=ends)
        assert "a:Sum: 0 of 5: SURVIVES" in lines


def test_another_end_kills_only_where_the_case_is_about_ends(matrix):
    ends = {
        (MEAN.spec, "means.mean/w1"): "raised ValueError",
        (MEAN.spec, "ends.hangs"): "raised ValueError",
        (SUM.spec, "means.sum"): "waiting",
    }
    _, lines = matrix({}, outcomes=ends)
    assert "a:Mean: 1 of 5: ends.hangs" in lines
    assert "a:Sum: 0 of 5: SURVIVES" in lines


def test_what_torch_does_not_have_is_neither_killed_nor_a_survivor(matrix):
    status, lines = matrix(
        {MEAN.spec: ["means.mean/w1"], "tests.mutants.a:Newer": ["means.newer"]},
        other="newer",
        needs=', needs=("torch.distributed.no_such_function",)',
        known=(MEAN, mutant("a:Newer", ("means.newer",))),
    )
    assert status == 0
    assert "means.newer" not in {case for _, case in MadeUp.observed}
    assert "a:Newer: not offered by this torch" in lines


def test_a_mutant_that_breaks_what_nobody_claims_fails(matrix):
    _, lines = matrix(
        {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}, known=(MEAN, SUM, mutant("a:B", ("no.claim",)))
    )
    assert failures(lines) == ["a:B: no case shows no.claim, which it is said to break"]


def test_a_trial_that_broke_off_is_told_and_not_kept(matrix):
    broken = {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}
    _, lines = matrix(broken, outcomes={(SUM.spec, "ends.dies"): "broke off"})
    assert failures(lines) == ["trials that broke off: 1, such as tests.mutants.a:Sum in ends.dies: no space left"]
    status, _ = matrix(broken)
    assert status == 0
    assert MadeUp.observed == [(SUM.spec, "ends.dies")]


def test_a_run_goes_on_from_a_file_that_breaks_off_anywhere(matrix, tmp_path):
    broken = {MEAN.spec: ["means.mean/w2"], SUM.spec: ["means.sum"]}
    file = tmp_path / "results.jsonl"
    whole = matrix(broken)
    text = file.read_text()
    for end in (len(text), len(text) - 1, len(text) - 9, len(text) // 2, 0):
        file.write_text(text[:end])
        status, lines = matrix(broken)
        assert (status, lines[:2]) == (whole[0], whole[1][:2])
        assert len(MadeUp.observed) == text.count("\n") - text[:end].count("\n") - (end == len(text) - 1)
        assert matrix(broken)[0] == 0
        assert not MadeUp.observed


def test_results_of_another_adapter_are_not_taken_for_this_ones(matrix, monkeypatch):
    broken = {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}
    matrix(broken)
    observed = list(MadeUp.observed)
    matrix(broken)
    assert not MadeUp.observed
    monkeypatch.setattr(trials, "_machinery", lambda: ["another subject.py"])
    matrix(broken)
    assert MadeUp.observed == observed


def test_a_trial_that_ran_out_of_time_is_tried_again(matrix):
    broken = {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}
    status, _ = matrix({MEAN.spec: ["means.mean/w1"]}, outcomes={(SUM.spec, "means.sum"): "waiting"})
    assert status == 1
    status, _ = matrix(broken)
    assert status == 0
    assert (SUM.spec, "means.sum") in MadeUp.observed


@pytest.mark.parametrize("slow", [SUM.spec, DEFAULT])
def test_no_survivor_is_called_so_before_it_had_its_time(matrix, slow):
    status, lines = matrix(
        {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.sum"]}, outcomes={(slow, "means.sum"): "slow"}
    )
    assert "a:Sum: 1 of 5: means.sum" in lines
    assert status == 0


def test_nor_is_one_said_to_be_caught_by_other_claims_only(matrix):
    broken = {MEAN.spec: ["means.mean/w1"], SUM.spec: ["means.mean/w1", "means.sum"]}
    _, lines = matrix(broken, "--first", "1", outcomes={(SUM.spec, "means.sum"): "slow"})
    assert "a:Sum: 2 of 2: means.mean/w1, means.sum" in lines
    assert not failures(lines)


def test_with_first_other_claims_are_tried_only_where_its_own_did_not_catch_it(matrix):
    broken = {MEAN.spec: ["means.mean/w1", "means.sum"], SUM.spec: ["means.mean/w1"]}
    _, lines = matrix(broken, "--first", "3")
    assert "a:Mean: 1 of 2: means.mean/w1" in lines
    assert "a:Sum: 1 of 5: means.mean/w1" in lines
    assert failures(lines) == ["a:Sum is caught by means.mean/w1, but by none of means.sum"]


def test_the_kill_matrix_as_json(matrix, tmp_path):
    matrix({MEAN.spec: ["means.mean/w2"]}, "--kills", str(tmp_path / "kills.json"))
    kills = json.loads((tmp_path / "kills.json").read_text())
    assert sorted(kills) == ["mutants", "torch", "unbroken_laws"]
    assert kills["mutants"][0] == {
        "name": "a:Mean",
        "promise": "the promise",
        "breaks": ["means.mean"],
        "base": DEFAULT,
        "tried": 5,
        "caught_by": ["means.mean/w2"],
        "broad": False,
    }
    assert kills["mutants"][1]["caught_by"] == []
    assert kills["unbroken_laws"] == [{"claim": "means.sum", "law": "the law", "reason": ""}]


def test_a_part_of_the_mutants_is_not_asked_whether_every_case_is_of_use(matrix):
    status, lines = matrix({MEAN.spec: ["means.mean/w1"]}, "--only", "Mean")
    assert status == 0
    assert not any("catches no mutant" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "NoSuch"], "--only NoSuch: no mutant has that in its name"),
        (["--others", "-1"], "--others takes 0 or more"),
        (["--first", "0"], "--first 1 or more"),
        (["--first", "3", "--kills", "kills.json"], "--kills is of every mutant"),
        (["--kills", "no/such/kills.json"], "--kills no/such/kills.json: there is no folder no/such"),
        (["--results", "no/such/results"], "--results no/such/results: there is no folder no/such"),
        (["--kills", "."], "--kills .: it is a folder; name a file in it"),
        (["--results", "."], "--results .: it is a folder; name a file in it"),
        (["--jobs", "0"], "--jobs 0: it takes 1 or more"),
        (["--jobs", "-1"], "--jobs -1: it takes 1 or more"),
    ],
)
def test_what_makes_no_sense_is_one_line(matrix, capsys, arguments, why):
    with pytest.raises(SystemExit, match="2"):
        matrix({}, *arguments)
    assert why in capsys.readouterr().err


def test_must_claims_from_which_no_kill_can_be_asked_are_named_by_reason():
    told = {
        line.partition(": ")[2].partition(": ")[0].partition(" ")[2]: line for line in mutants.not_asked(all_cases())
    }
    assert "power_sgd.pickled_state" in told["MUST claims that are about torch and not about the subject"]
    assert "precision.buffers" in told["MUST claims that need another lane"]
    assert "no_sync.accumulates" not in "".join(told.values())
