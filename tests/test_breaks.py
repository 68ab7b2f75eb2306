"""Break DDP in five ways: the claims that speak of the break catch it, the report explains it, and nothing hangs."""

import pytest

from tests.runs import ROOT, Little

BREAKS = {
    "of_reduction:Sums": ("mean_gradients.mean", "mean_gradients.effective_batch"),
    "of_construction:CopiesNothing": ("rank0_broadcast.parameters", "trajectory.different_start"),
    "of_no_sync:IgnoresNoSync": ("no_sync.accumulates", "no_sync.starts_no_collective"),
    "of_buckets:NeverRebuilds": ("rebuild.once", "rebuilt_buckets.ready_order"),
    "of_buckets:ReducesAtTheEnd": ("firing.as_buckets_fill",),
}
ONLY_TO_LOOK_AT = ("hook_registration.signature_checked", "unused_parameters.none_stays_none")
"""Claims that none of the five breaks."""
FIRST = next(iter(BREAKS))


# `ci.mutants` sees the laws broken that the others break; what pytest makes of that is the same.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if FIRST != name else []) for name in BREAKS]
)
def test_a_break_is_caught_by_the_claims_that_speak_of_it(name, tmp_path):
    claims = [f"--claim={claim}" for claim in (*BREAKS[name], *ONLY_TO_LOOK_AT)]
    subject = f"--subject=tests.mutants.{name}"
    places = (str(ROOT / "conformance"),)
    run = Little(tmp_path / "suite").run(subject, *claims, "-pno:cacheprovider", places=places, cwd=ROOT)
    assert run.exit == 1, run.output
    caught = {case.partition("/")[0] for case, verdict in run.verdicts.items() if verdict == "violated"}
    assert caught == set(BREAKS[name]), run.output
    assert not [case for case, line in run.cases.items() if "outcome" in line["facts"]], "nobody died, raised or hung"
    for line in (f"{BREAKS[name][0]}", "claim:  ", "broken law: ", "got      ", "expected ", "score: "):
        assert line in run.output
    must = [case for case, line in run.cases.items() if line["level"] == "MUST" and line["verdict"] == "violated"]
    assert ("fix first: " in run.output) == bool(must)
