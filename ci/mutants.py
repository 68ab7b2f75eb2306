"""
The kill matrix: which cases catch which mutant.

    python -m ci.mutants                              every mutant, every case: hours; resumes from mutants.jsonl
    python -m ci.mutants --others 10                  the cases of the mutant's own families, and ten of all others
    python -m ci.mutants --others 0 --first 3         its own families only, until three cases caught it, or one and
                                                      all of the claims that it names have been tried

A mutant is a DDP with one defect (`tests/mutants/`). One that more than half of the other families' cases that were tried
catch is broad and proves nothing about any one of them; with `--others 0` only those `at_large` can be found so, which are
tried on every case whatever `--others` says, for the sake of the laws that they break. Failures, a line each: a mutant
that survives or that none of the claims it names catches, a MUST case, its facets taken together, that catches no narrow
mutant, and a law of a MUST case that no mutant breaks and for which `tests/mutants/unbroken.toml` has no reason.
"""

import argparse
import importlib
import inspect
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_conformance.case import MUST, Case
from ddp_conformance.subject import DEFAULT

from ci.cases import ROOT, all_cases
from ci.trials import LANE, PATIENCE, Results, Shot, Trials, digest, find_shots, is_asked

REFERENCE = "tests.reference_ddp:ReferenceDDP"
FOLDER = ROOT / "tests" / "mutants"
UNBROKEN = FOLDER / "unbroken.toml"


@dataclass(frozen=True)
class Mutant:
    """A subject with one defect: its spec, what it was made from, the claims it breaks, and what its sources hash to."""

    spec: str
    base: str
    breaks: tuple[str, ...]
    promise: str
    sources: str
    at_large: bool = False

    @property
    def name(self) -> str:
        return self.spec.removeprefix("tests.mutants.")

    @property
    def families(self) -> set[str]:
        return {claim.partition(".")[0] for claim in self.breaks}


@dataclass
class Hunt:
    """What was tried on one mutant, in this order, and which cases caught it."""

    mutant: Mutant
    tried: list[Shot] = field(default_factory=list)
    caught: list[Shot] = field(default_factory=list)

    @property
    def is_broad(self) -> bool:
        def elsewhere(shots: Iterable[Shot]) -> int:
            return sum(shot.case.family not in self.mutant.families for shot in shots)

        return 2 * elsewhere(self.caught) > elsewhere(self.tried)

    @property
    def is_caught_by_its_own(self) -> bool:
        """Whether a case of the claims that it is said to break caught it."""
        return any(shot.case.claim in self.mutant.breaks for shot in self.caught)

    def told(self) -> str:
        if not self.tried:
            return f"{self.mutant.name}: not offered by this torch"
        ids = ", ".join(shot.id for shot in self.caught[:6]) + (", ..." if len(self.caught) > 6 else "")
        broad = " (broad)" if self.is_broad else ""
        return f"{self.mutant.name}: {len(self.caught)} of {len(self.tried)}{broad}: {ids or 'SURVIVES'}"


def find_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Every public class or function in tests/mutants/*.py that says what it `breaks`, by module and line."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    reference = importlib.import_module(REFERENCE.partition(":")[0]).ReferenceDDP
    found = []
    for path in sorted(folder.glob("*.py")):
        name = f"tests.mutants.{path.stem}"
        module = importlib.import_module(name)
        for label, target in vars(module).items():
            breaks = vars(target).get("breaks") if inspect.isclass(target) or inspect.isfunction(target) else None
            if label.startswith("_") or not breaks or target.__module__ != name:
                continue
            of_reference = inspect.isclass(target) and issubclass(target, reference)
            promise = " ".join((target.__doc__ or "").split("\n\n")[0].split())
            found.append(
                Mutant(
                    spec=f"{name}:{label}",
                    base=REFERENCE if of_reference else DEFAULT,
                    breaks=(breaks,) if isinstance(breaks, str) else tuple(breaks),
                    promise=promise,
                    sources=digest(path.read_text(encoding="utf-8"), sources_of(REFERENCE) if of_reference else ""),
                    at_large=bool(vars(target).get("at_large")),
                )
            )
    return found


def sources_of(base: str) -> str:
    if base == DEFAULT:
        return ""
    return digest((ROOT / "tests" / "reference_ddp.py").read_text(encoding="utf-8"))


def order_for(mutant: Mutant, shots: Sequence[Shot], others: int | None) -> list[Shot]:
    """
    The cases of the claims it breaks, then those of its families, small worlds first, then `others` of the rest; none for
    which its base lacks something, for there it could not be told from that.
    """
    shots = [shot for shot in shots if is_asked(mutant.base, shot.case)]

    def distance(shot: Shot) -> tuple[bool, int]:
        return shot.case.claim not in mutant.breaks, shot.facet.world

    own = [shot for shot in shots if shot.case.family in mutant.families]
    rest = [shot for shot in shots if shot not in own and not shot.case.env]  # new interpreters: 5 s a case
    if others is not None and not mutant.at_large:
        rest = sorted(rest, key=lambda shot: digest(mutant.name, shot.id))[:others]  # a larger number adds to a smaller
    return sorted(own, key=distance) + rest


def hunt(trials: Trials, mutant: Mutant, shots: Sequence[Shot], first: int | None) -> Hunt:
    """
    The cases that catch the mutant; nothing is tried where this torch lacks what it breaks.

    With `first` no more than that many, and once its claims have been tried and caught it none of other claims, which
    could make no failure of it.
    """
    found = Hunt(mutant)
    if not any(shot.case.claim in mutant.breaks for shot in shots):
        return found
    base, spec = (mutant.base, sources_of(mutant.base)), (mutant.spec, mutant.sources)
    for shot in shots:
        if first and shot.case.claim not in mutant.breaks and found.is_caught_by_its_own:
            break
        found.tried.append(shot)
        if trials.differ(base, spec, shot):
            found.caught.append(shot)
            if len(found.caught) == first:
                break
    if not found.is_caught_by_its_own:  # a busy machine may have run out of time, which is no finding
        own = [shot for shot in found.tried if shot.case.claim in mutant.breaks]
        found.caught += [shot for shot in own if trials.differ(base, spec, shot, PATIENCE)]
    return found


def failures(hunts: Sequence[Hunt], shots: Sequence[Shot]) -> Iterator[str]:
    """What is wrong with a mutant, a line each."""
    claims = {shot.case.claim for shot in shots}
    for found in hunts:
        mutant = found.mutant
        unknown = [claim for claim in mutant.breaks if claim not in claims]
        if not mutant.promise:
            yield f"{mutant.name}: no docstring names the promise it breaks"
        if unknown:
            yield f"{mutant.name}: no case shows {', '.join(unknown)}, which it is said to break"
        elif not found.tried:
            continue  # this torch lacks what it breaks
        elif not found.caught:
            yield f"{mutant.name} survives: {mutant.promise}"
        elif not found.is_caught_by_its_own:
            others = ", ".join(shot.id for shot in found.caught[:3])
            yield f"{mutant.name} is caught by {others}, but by none of {', '.join(mutant.breaks)}"


def idle_cases(trials: Trials, hunts: Sequence[Hunt], shots: Sequence[Shot]) -> tuple[list[str], list[str]]:
    """
    MUST cases that catch no narrow mutant, a line each, and the claims of those from which that cannot be asked here:
    torch's own DDP breaks them on this release.
    """
    useful = {shot.case.program for found in hunts if not found.is_broad for shot in found.caught}
    idle, broken = [], []
    for case in {shot.case.program: shot.case for shot in shots}.values():
        if case.level != MUST or case.program in useful or not is_asked(DEFAULT, case):
            continue
        if any(trials.holds(DEFAULT, "", shot) for shot in shots if shot.case is case):
            idle.append(f"{case.claim} ({case.program.__name__}) catches no mutant")
        else:
            broken.append(case.claim)
    return idle, broken


def not_asked(cases: Iterable[Case]) -> Iterator[str]:
    """The MUST claims from which no kill can be asked here, a line for each reason."""
    claims: dict[str, set[str]] = {}
    for case in cases:
        if case.level == MUST:
            of_torch = "are about torch and not about the subject" if case.of == "torch" else ""
            elsewhere = "" if LANE.admitted_by(case.lanes) else "need another lane"
            reason = of_torch or elsewhere or ("" if is_asked(DEFAULT, case) else "this torch does not offer")
            claims.setdefault(case.claim, set()).add(reason)
    for reason in sorted({min(reasons) for reasons in claims.values()} - {""}):
        found = [claim for claim, reasons in claims.items() if min(reasons) == reason]
        yield f"not asked: {len(found)} MUST claims that {reason}: {', '.join(found)}"


def laws_of_must(trials: Trials, shots: Sequence[Shot]) -> tuple[set[str], set[str]]:
    """The laws of MUST cases, as "claim: law": those that ran, and those that some subject broke."""
    must = {shot.id: shot.case.claim for shot in shots if shot.case.level == MUST}
    ran: set[str] = set()
    broken: set[str] = set()
    for result in trials.judged():
        if result.case in must:
            ran.update(f"{must[result.case]}: {law}" for law in result.laws)
            broken.update(f"{must[result.case]}: {law}" for law in result.broken)
    return ran, broken


def load_reasons(path: Path = UNBROKEN) -> dict[str, str]:
    """Reasons by "claim: law"; the file has, by reason, the laws that no mutant need break."""
    by_reason: dict[str, list[str]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {law: reason for reason, laws in by_reason.items() for law in laws}


def plain(hunts: Sequence[Hunt], unbroken: dict[str, str], torch: str) -> dict[str, Any]:
    """The kill matrix as data, for ci.report."""
    return {
        "torch": torch,
        "mutants": [
            {
                "name": found.mutant.name,
                "promise": found.mutant.promise,
                "breaks": list(found.mutant.breaks),
                "base": found.mutant.base,
                "tried": len(found.tried),
                "caught_by": [shot.id for shot in found.caught],
                "broad": found.is_broad,
            }
            for found in hunts
        ],
        "unbroken_laws": [
            {"claim": claim, "law": text, "reason": reason}
            for claim, _, text, reason in ((*law.partition(": "), reason) for law, reason in unbroken.items())
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.mutants", description="Run broken DDPs against the suite.")
    parser.add_argument(
        "--others", type=int, metavar="N", help="of other families' cases try only N, drawn for each mutant"
    )
    parser.add_argument("--first", type=int, metavar="N", help="stop at a mutant's first N kills")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="mutants whose name has TEXT in it")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON Lines to keep and to resume from")
    parser.add_argument("--kills", type=Path, metavar="FILE", help="write the kill matrix as JSON, for ci.report")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    options = parser.parse_args(arguments)
    if (options.others is not None and options.others < 0) or (options.first is not None and options.first < 1):
        parser.error("--others takes 0 or more, --first 1 or more")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: it takes 1 or more")
    for option, path in (("--results", options.results), ("--kills", options.kills)):
        if path is not None and path.is_dir():
            parser.error(f"{option} {path}: it is a folder; name a file in it")
        if path is not None and not path.parent.is_dir():
            parser.error(f"{option} {path}: there is no folder {path.parent}")
    whole = not (options.first or options.only)
    if options.kills and not whole:
        parser.error("--kills is of every mutant: leave out --only and --first")
    if options.results is None and whole:
        options.results = ROOT / "mutants.jsonl"

    began = time.monotonic()
    shots = find_shots()
    mutants = [
        found for found in find_mutants() if not options.only or any(text in found.name for text in options.only)
    ]
    if not mutants:
        parser.error(f"--only {' '.join(options.only)}: no mutant has that in its name")
    reasons = load_reasons()
    results = Results(options.results)
    try:
        results.load()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--results {options.results}: {error}: name another file, or remove it")
    trials = Trials(results)
    try:
        with ThreadPoolExecutor(options.jobs) as pool:

            def one(mutant: Mutant) -> Hunt:
                found = hunt(trials, mutant, order_for(mutant, shots, options.others), options.first)
                print(found.told(), flush=True)
                return found

            hunts = list(pool.map(one, mutants))
        tried = [found for found in hunts if found.tried]
        wrong = list(failures(hunts, shots))
        if whole:
            ran, broken = laws_of_must(trials, shots)
            unbroken = {law: reasons.get(law, "") for law in sorted(ran - broken)}
            idle, unsound = idle_cases(trials, tried, shots)
    finally:
        trials.close()
    if whole:
        print("\nlaws of MUST cases that no mutant breaks:")
        for law, reason in unbroken.items():
            print(f"  {law} ({reason or 'no reason given'})")
        for line in not_asked(all_cases()):
            print(line)
        for claim in unsound:
            print(f"not asked: {claim}, which torch {trials.settings.torch} itself breaks; it catches no mutant")
        wrong += idle
        wrong += [f"no mutant breaks {law}" for law, reason in unbroken.items() if not reason]
        wrong += [f"a mutant does break {law}: take it out of {UNBROKEN.name}" for law in reasons if law in broken]
        if options.kills:
            text = json.dumps(plain(tried, unbroken, trials.settings.torch), indent=1)
            options.kills.write_text(text + "\n", encoding="utf-8")
    for (subject, case), why in list(trials.broke_off.items())[:1]:
        last = " ".join(why.split())[-200:]
        wrong.append(f"trials that broke off: {len(trials.broke_off)}, such as {subject} in {case}: {last}")
    survivors = sum(not found.caught for found in tried)
    print(
        f"\n{len(tried)} mutants, {len(shots)} cases, {survivors} survive, {len(hunts) - len(tried)} not offered, "
        f"{len(trials.used)} trials, {time.monotonic() - began:.0f} s"
    )
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
