"""ci/reports holds a text and a script, ready to send, for each claim that a release breaks and nobody has reported."""

from functools import cache

import pytest
from ddp_conformance import golden
from ddp_conformance.suite import golden_path

from ci import reproduce
from ci.cases import CONFORMANCE, all_cases

LANE = "gloo:cpu"
TEXTS = sorted(reproduce.REPORTS.glob("*.md"))


@cache
def unreported():
    """By claim: the `broken` entries that have a note and no link."""
    found = {}
    for case in all_cases():
        for name, table in golden.load(golden_path(case)).items():
            if f"{case.family}.{name}".partition("/")[0] == case.claim:
                found.setdefault(case.claim, []).extend(e for e in table.get("broken", []) if "link" not in e)
    return {claim: entries for claim, entries in found.items() if entries}


def affected(entry):
    """The first and the last release measured in which the entry is in force."""
    observed = golden.load(CONFORMANCE / "golden" / "observed.toml")[LANE]
    end = entry.get("until", "9999")
    within = [v for v in observed if golden.release(entry["since"]) <= golden.release(v) < golden.release(end)]
    return min(within, key=golden.release), max(within, key=golden.release)


def test_what_nobody_has_reported_has_a_report():
    assert unreported().keys() - {text.stem for text in TEXTS} == set()


@pytest.mark.parametrize("claim", unreported())
def test_a_report_names_the_releases_that_were_measured(claim):
    for entry in unreported()[claim]:
        assert " to ".join(affected(entry)) in (reproduce.REPORTS / f"{claim}.md").read_text()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_report_is_complete(text):
    lines = text.read_text().splitlines()
    assert lines[0].startswith("# ")
    for part in ("Affected", "What happens", "What is documented", "Cause"):
        assert any(line.startswith(f"**{part}**") for line in lines), part


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_report_has_the_script_that_reproduce_prints(text):
    script = text.with_suffix(".py").read_text()
    printed = reproduce.script(*reproduce.find(text.stem), LANE, None) + "\n"
    assert script == printed, "write it anew: python -m ci.reproduce --reports"
