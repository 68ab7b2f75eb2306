"""What a run says at its end: why some cases were not judged, and to the author of a subject what to mend first."""

from ddp_conformance import record, tally

from ci.cases import all_cases
from tests.runs import Little

CASES = """
    from ddp_conformance import HAZARD, MUST, case
    from ddp_conformance.models import linear

    @case("construction.accepts", level=MUST, source="DistributedDataParallel")
    def test_accepts(rank):
        "A module is accepted."
        rank.law("its weight", rank.wrap(linear(2)).module.weight.tolist(), linear(2).weight.tolist())

    @case("mean_gradients.mean", level=MUST, source="DistributedDataParallel")
    def test_mean(rank):
        "Every rank gets the mean."
        model = linear(2)
        rank.wrap(model)(rank.batch(2)).sum().backward()
        rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))

    @case("buffers.odd", level=HAZARD, source="DistributedDataParallel")
    def test_odd(rank):
        "The sum is one too large."
        model = linear(2)
        rank.wrap(model)(rank.batch(2)).sum().backward()
        rank.law("one too large", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)) + 1)

    @case("logging.data", level=MUST, source="DistributedDataParallel", needs=("subject.no_such_thing",))
    def test_logging(rank):
        "There is logging data."
"""


def test_what_sums_up_a_run_is_the_last_to_be_read(tmp_path):
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASES)
    run = suite.run("--subject=tests.mutants.of_reduction:Sums")
    assert run.exit == 1
    assert "fix first: mean_gradients.mean: broken law: the mean\n" in run.output
    assert "score: 1 of 2 MUST cases that tests.mutants.of_reduction:Sums offers hold, 1 is not offered\n" in run.output
    hazards = "\nnot scored: 0 of 1 HAZARD cases are as with torch's DDP, which nobody promised\n"
    parts = ("\nFAILED ", "\nall ", "\nnot offered: 1 case: ", "\nfix first: ", hazards, "\nscore: ", " skipped in ")
    places = [run.output.rindex(part) for part in parts]
    assert places == sorted(places), run.output


def test_one_level_alone_is_never_the_whole_suite(tmp_path):
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASES)
    suite.write("golden/gone.toml", "[case]\nlaws = 1\n")
    run = suite.run("--subject=tests.mutants.of_reduction:Sums", "--level=HAZARD", "-n2")
    assert run.verdicts == {"buffers.odd": "violated"}
    assert not record.read(run.record).whole_suite
    assert "score: none, for no MUST case that was run is offered" in run.output


def test_what_was_raised_is_told_with_the_first_line():
    trace = "Traceback (most recent call last):\n  somewhere\nValueError: Global rank 0 is not part of group"
    assert tally._in_short(f"rank 1: raised ValueError\n{trace}") == (
        "rank 1: raised ValueError: Global rank 0 is not part of group"
    )
    assert tally._in_short("broken law: the mean\nrank 0:\n    got      6") == "broken law: the mean"
    assert tally._in_short("rank 0: SIGKILL") == "rank 0: SIGKILL"


def test_what_much_else_follows_from_is_mended_first():
    """A DDP that forgets to divide lets replicas drift apart, too, and may as well refuse nothing."""

    def told(*claims):
        cases = [tally.Judged(claim, "MUST", "gloo:cpu", "violated", f"broken law: {claim}") for claim in claims]
        return [line.split(": ")[1] for line in tally._fix_first(cases)]

    rest = ("construction.refuses", "rank0_broadcast.replicas_stay_equal", "autograd.hooks", "mean_gradients.w/w2")
    assert told(*rest, "mean_gradients.mean/w2") == [
        "mean_gradients.mean",
        "rank0_broadcast.replicas_stay_equal",
        "construction.refuses",
        "autograd.hooks",
    ]
    assert told(*rest, "rank0_broadcast.parameters")[0] == "rank0_broadcast.parameters"


def test_what_is_mended_first_is_a_claim_or_a_family():
    known = {name for case in all_cases() for name in (case.claim, case.family)}
    assert set(tally.FIX_FIRST) <= known


def test_what_torch_does_too_is_mended_last_and_told_with_the_score(tmp_path):
    """A case may be of a part of torch's own, such as a hook, which no DDP can mend."""
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASES)
    broken = "[[mean.broken]]\nsince = '1.13'\nlaw = 'the mean'\nnote = 'it adds up'\n"
    suite.write("golden/mean_gradients.toml", f"[mean]\nlaws = 1\n{broken}")
    suite.write(
        "adds.py",
        """
        import torch
        from tests.mutants.of_reduction import Sums

        class AddsUp(Sums):
            def __init__(self, module):
                super().__init__(module)
                with torch.no_grad():
                    module.weight += 1
        """,
    )
    run = suite.run("--subject=adds:AddsUp")
    assert "fix first: construction.accepts: broken law: its weight\nthen: mean_gradients.mean: " in run.output
    score = "score: 0 of 2 MUST cases that adds:AddsUp offers hold, 1 of the others is as with torch's own DDP"
    assert f"{score}, 1 is not offered\n" in run.output


def test_only_the_reasons_that_explain_most_are_told():
    def case(reason):
        return tally.Judged("a.b", "MUST", "gloo:cpu", "not offered", f"it has no {reason}")

    reasons = [reason for reason in range(tally.REASONS + 2) for _ in range(reason + 1)]
    lines = [
        line
        for line in tally._by_family([case(reason) for reason in reasons])
        if "more reasons" in line or ": " in line
    ]
    assert lines[0] == "not offered: 12 cases: it has no 11"
    assert lines[-1] == "and 2 more reasons, all of which pytest -rs tells"
    assert len(lines) == tally.REASONS + 1
