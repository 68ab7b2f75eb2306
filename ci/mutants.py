"""
The kill matrix: every mutant against every case, and which case caught which.

    python -m ci.mutants                              every mutant, every case: no time limit, resumes where it stopped
    python -m ci.mutants --family-only --first 3      the cases of the mutant's own families, until three caught it

A mutant is a DDP with one defect (`tests/mutants/`). A case kills it when a law is false that holds on what the mutant
was made from (torch's DDP or the reference), and a refusal that does not come is such a law. Deaths, hangs and
exceptions kill only in cases that are about them, for anything can make a program raise. A mutant that more than half
of the cases catch is broad and proves nothing about any one of them. Failures, a line each: a mutant that survives or
that none of the claims it names catches, and a MUST case, its facets taken together, that catches no narrow mutant.
"""

import argparse
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ddp_conformance import ranks, record
from ddp_conformance.case import MUST, Case, Facet, program_hash
from ddp_conformance.lanes import Lane
from ddp_conformance.ranks import permitted
from ddp_conformance.subject import DEFAULT, NoData, NotOffered, Subject
from ddp_conformance.suite import Settings, Suite
from ddp_conformance.verdict import collect_laws

ROOT = Path(__file__).parent.parent
REFERENCE = "tests.reference_ddp:ReferenceDDP"
LANE = Lane("gloo", "cpu")
DEADLINE = 3.0
FRESH_DEADLINE = 30.0
"""For cases with variables of their own, whose ranks are new interpreters."""
GRACE = 0.3
"""Seconds for the peers of a rank that failed: nobody reads here what they saw."""


@dataclass(frozen=True)
class Mutant:
    """A subject with one defect: its spec, what it was made from, the claims it breaks, and what its sources hash to."""

    spec: str
    base: str
    breaks: tuple[str, ...]
    promise: str
    sources: str

    @property
    def name(self) -> str:
        return self.spec.removeprefix("tests.mutants.")

    @property
    def families(self) -> set[str]:
        return {claim.partition(".")[0] for claim in self.breaks}


@dataclass(frozen=True)
class Shot:
    """One facet of a case, as it is run."""

    case: Case
    facet: Facet

    @property
    def id(self) -> str:
        return self.case.id(self.facet)


@dataclass
class Result:
    """What one subject did in one case: how its ranks ended, and the texts of its laws, broken ones apart."""

    subject: str
    case: str
    key: str
    outcomes: list[str]
    laws: list[str]
    broken: list[str]
    seconds: float = 0.0


@dataclass
class Results:
    """The results so far, kept as JSON Lines so that a run can be resumed; a key covers all that a result depends on."""

    path: Path | None
    known: dict[str, Result] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                result = Result(**json.loads(line))
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed
            self.known[result.key] = result

    def add(self, result: Result) -> None:
        with self.lock:
            self.known[result.key] = result
            if self.path is not None:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(vars(result)) + "\n")


class Range:
    """Runs subjects against cases, each thread on one rank server of its own, which serves all subjects."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.settings = Settings(
            lanes=(LANE,), torch=record.torch_build()["torch"], path=(str(ROOT),), deadline=DEADLINE
        )
        self._suites = threading.local()
        self._all: list[Suite] = []

    def run(self, subject: str, sources: str, shot: Shot) -> Result:
        key = _hash(subject, sources, shot.id, program_hash(shot.case, shot.facet), self.settings.torch)
        if key in self.results.known:
            return self.results.known[key]
        if not _is_asked(subject, shot.case):
            return Result(subject, shot.id, key, ["not offered"], [], [])
        suite = self._suite()
        deadline = FRESH_DEADLINE if shot.case.env else DEADLINE
        suite.settings = replace(self.settings, subject=subject, deadline=deadline)
        case = shot.case
        observation = suite.observe(
            LANE,
            case.path,
            case.program.__name__,
            shot.facet.world,
            key=shot.facet.key,
            group=case.group,
            needs=case.needs,
            may=case.may,
            env=case.env,
            group_timeout=case.group_timeout,
        )
        laws = collect_laws(observation)
        outcomes = ["broke off"] if observation.broke_off is not None else observation.outcomes()
        broken = [text for text, counts in laws.items() if counts["broken"]]
        result = Result(subject, shot.id, key, outcomes, list(laws), broken, round(observation.seconds, 3))
        self.results.add(result)
        return result

    def kills(self, mutant: Mutant, shot: Shot) -> bool:
        result = self.run(mutant.spec, mutant.sources, shot)
        about_ends = bool(shot.case.may) and result.outcomes != ["broke off"]
        if not result.broken and not about_ends:
            return False
        base = self.run(mutant.base, sources_of(mutant.base), shot)
        if set(result.broken) - set(base.broken):
            return True
        ended_well = all(permitted(outcome, shot.case.may) for outcome in base.outcomes)
        return about_ends and ended_well and result.outcomes != base.outcomes

    def close(self) -> None:
        for suite in self._all:
            suite.close()

    def _suite(self) -> Suite:
        if not hasattr(self._suites, "own"):
            self._suites.own = Suite(self.settings)
            self._all.append(self._suites.own)
        own: Suite = self._suites.own
        return own


def _is_asked(subject: str, case: Case) -> bool:
    """Whether the subject offers what the case needs, known here without starting ranks for it."""
    try:
        for need in case.needs:
            _subject(subject).need(need)
    except (NotOffered, NoData):
        return False
    return True


@cache
def _subject(spec: str) -> Subject:
    return Subject(spec)


def find_mutants(folder: Path = ROOT / "tests" / "mutants") -> list[Mutant]:
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
                    sources=_hash(path.read_text(encoding="utf-8"), sources_of(REFERENCE) if of_reference else ""),
                )
            )
    return found


def find_shots(folder: Path = ROOT / "conformance") -> list[Shot]:
    """Every facet of every case that goes through the subject and that this lane can show."""
    shots = []
    for path in sorted(folder.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        for value in vars(module).values():
            case = getattr(value, "case", None)
            if isinstance(case, Case) and case.of == "subject" and LANE.admitted_by(case.lanes):
                shots += [Shot(case, facet) for facet in case.facets()]
    return shots


def sources_of(base: str) -> str:
    if base == DEFAULT:
        return ""
    return _hash((ROOT / "tests" / "reference_ddp.py").read_text(encoding="utf-8"))


def order_for(mutant: Mutant, shots: Iterable[Shot], *, family_only: bool) -> list[Shot]:
    """The cases of the claims it breaks first, then those of its families, then all others, small worlds first."""

    def distance(shot: Shot) -> tuple[int, int]:
        own = 0 if shot.case.claim in mutant.breaks else 1 if shot.case.family in mutant.families else 2
        return own, shot.facet.world

    chosen = [
        shot
        for shot in shots
        if shot.case.family in mutant.families or not (family_only or shot.case.env)  # new interpreters: 5 s a case
    ]
    return sorted(chosen, key=distance)


def hunt(range_: Range, mutant: Mutant, shots: Sequence[Shot], first: int | None) -> list[Shot]:
    """The cases that catch the mutant, in the order tried; no more than `first`."""
    caught: list[Shot] = []
    for shot in shots:
        if range_.kills(mutant, shot):
            caught.append(shot)
            if len(caught) == first:
                break
    return caught


def failures(
    mutants: Sequence[Mutant], shots: Sequence[Shot], matrix: dict[str, list[Shot]], *, whole: bool
) -> Iterator[str]:
    """What must not be, a line each."""
    claims = {shot.case.claim for shot in shots}
    for mutant in mutants:
        caught = matrix[mutant.spec]
        unknown = [claim for claim in mutant.breaks if claim not in claims]
        if not mutant.promise:
            yield f"{mutant.name}: no docstring names the promise it breaks"
        if unknown:
            yield f"{mutant.name}: no case shows {', '.join(unknown)}, which it is said to break"
        elif not caught:
            yield f"{mutant.name} survives: {mutant.promise}"
        elif not any(shot.case.claim in mutant.breaks for shot in caught):
            others = ", ".join(shot.id for shot in caught[:3])
            yield f"{mutant.name} is caught by {others}, but by none of {', '.join(mutant.breaks)}"
    if whole:
        narrow = [mutant for mutant in mutants if not is_broad(matrix[mutant.spec], shots)]
        useful = {shot.case.program for mutant in narrow for shot in matrix[mutant.spec]}
        for case in {shot.case.program: shot.case for shot in shots}.values():
            if case.level == MUST and case.program not in useful:
                yield f"{case.claim} ({case.program.__name__}) catches no mutant"


def is_broad(caught: Sequence[Shot], shots: Sequence[Shot]) -> bool:
    return 2 * len(caught) > len(shots)


def never_broken(range_: Range, shots: Sequence[Shot]) -> Iterator[str]:
    """Law texts of MUST cases that no subject ever broke in these results."""
    broken: dict[str, set[str]] = defaultdict(set)
    held: dict[str, set[str]] = defaultdict(set)
    for result in range_.results.known.values():
        broken[result.case.partition("/")[0]].update(result.broken)
        held[result.case.partition("/")[0]].update(result.laws)
    must = {shot.case.claim for shot in shots if shot.case.level == MUST}
    for claim in sorted(must):
        for text in sorted(held[claim] - broken[claim]):
            yield f"{claim}: {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.mutants", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--family-only", action="store_true", help="only the cases of the mutant's own families")
    parser.add_argument("--first", type=int, metavar="N", help="stop at a mutant's first N kills")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="mutants whose name has TEXT in it")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON Lines to keep and to resume from")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    options = parser.parse_args(arguments)
    whole = not (options.family_only or options.first or options.only)
    if options.results is None and whole:
        options.results = ROOT / "mutants.jsonl"

    ranks.GRACE = GRACE
    began = time.monotonic()
    shots = find_shots()
    mutants = [
        mutant for mutant in find_mutants() if not options.only or any(text in mutant.name for text in options.only)
    ]
    results = Results(options.results)
    results.load()
    range_ = Range(results)
    matrix: dict[str, list[Shot]] = {}
    try:
        with ThreadPoolExecutor(options.jobs) as pool:

            def one(mutant: Mutant) -> None:
                tried = order_for(mutant, shots, family_only=options.family_only)
                caught = hunt(range_, mutant, tried, options.first)
                matrix[mutant.spec] = caught
                broad = " (broad)" if whole and is_broad(caught, shots) else ""
                ids = ", ".join(shot.id for shot in caught[:6]) + (", ..." if len(caught) > 6 else "")
                print(f"{mutant.name}: {len(caught)} of {len(tried)}{broad}: {ids}", flush=True)

            for done in [pool.submit(one, mutant) for mutant in mutants]:
                done.result()
    finally:
        range_.close()
    if whole:
        print("\nlaws of MUST cases that no mutant breaks:")
        for line in never_broken(range_, shots):
            print(f"  {line}")
    wrong = list(failures(mutants, shots, matrix, whole=whole))
    seconds = time.monotonic() - began
    survivors = sum(not caught for caught in matrix.values())
    print(f"\n{len(mutants)} mutants, {len(shots)} cases, {survivors} survive, {seconds:.0f} s")
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
