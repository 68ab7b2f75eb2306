"""
What one subject does in one case: run, kept, and not run again.

A trial is a case run on a subject outside pytest. A mutant's trial is a kill when a law is false that holds on what the
mutant was made from, and a refusal that does not come is such a law. Deaths, hangs and exceptions kill only in cases
that are about them, for anything can make a program raise.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ddp_conformance import ranks, record
from ddp_conformance.case import Case, Facet, program_hash, source_hash
from ddp_conformance.lanes import Lane
from ddp_conformance.ranks import Observation, permitted
from ddp_conformance.subject import NoData, NotOffered, Subject
from ddp_conformance.suite import Settings, Suite
from ddp_conformance.verdict import collect_laws

from ci.cases import ROOT, all_cases

LANE = Lane("gloo", "cpu")
DEADLINE = 3.0
PATIENCE = 30.0
"""For cases with variables of their own, whose ranks are new interpreters, and for a second look on a busy machine."""
GRACE = 0.3
"""Seconds for the peers of a rank that failed: nobody reads here what they saw."""
NOT_OFFERED = ["not offered"]
BROKE_OFF = ["broke off"]
"""Before the rank program began: such a trial is not kept, and says nothing of the subject."""


@dataclass(frozen=True)
class Shot:
    """One facet of a case, as it is run."""

    case: Case
    facet: Facet

    @property
    def id(self) -> str:
        return self.case.id(self.facet)


def find_shots() -> list[Shot]:
    """Every facet of every case that goes through the subject and that this lane can show."""
    return [
        Shot(case, facet)
        for case in all_cases()
        if case.of == "subject" and LANE.admitted_by(case.lanes)
        for facet in case.facets()
    ]


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
        text = self.path.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                result = Result(**json.loads(line))
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed
            self.known[result.key] = result
        if text and not text.endswith("\n"):
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("\n")

    def add(self, result: Result, keep: bool = True) -> None:
        with self.lock:
            self.known[result.key] = result
            if self.path is not None and keep:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(vars(result)) + "\n")


class Trials:
    """Runs subjects against cases, each thread on one rank server of its own, which serves all subjects."""

    def __init__(self, results: Results) -> None:
        ranks.GRACE = GRACE
        self.results = results
        self.settings = Settings(
            lanes=(LANE,), torch=record.torch_build()["torch"], path=(str(ROOT),), deadline=DEADLINE
        )
        self.used: set[str] = set()
        self.broke_off: dict[tuple[str, str], str] = {}
        self._suites = threading.local()
        self._all: list[Suite] = []

    def run(self, subject: str, sources: str, shot: Shot, deadline: float = DEADLINE) -> Result:
        """The result of this subject, whose sources hash to this, in this case: the kept one, or that of a run."""
        case = shot.case
        key = digest(subject, sources, shot.id, program_hash(case, shot.facet), self.settings.torch, _machinery())
        self.used.add(key)
        known = self.results.known.get(key)
        if known is not None and not (deadline > DEADLINE and _ran_out_of_time(known, case)):
            return known
        if not is_asked(subject, case):
            return Result(subject, shot.id, key, NOT_OFFERED, [], [])
        observation = self.observe(subject, shot, deadline)
        if observation.broke_off is not None:
            self.broke_off[subject, shot.id] = observation.broke_off
            return Result(subject, shot.id, key, BROKE_OFF, [], [])
        laws = collect_laws(observation)
        broken = [text for text, counts in laws.items() if counts["broken"]]
        result = Result(
            subject, shot.id, key, observation.outcomes(), list(laws), broken, round(observation.seconds, 3)
        )
        self.results.add(result, keep=not _ran_out_of_time(result, case))  # that is no finding: try it again next time
        return result

    def observe(self, subject: str, shot: Shot, deadline: float) -> Observation:
        """The case on fresh ranks, those of this thread's server."""
        case, suite = shot.case, self._suite()
        suite.settings = replace(self.settings, subject=subject, deadline=PATIENCE if case.env else deadline)
        return suite.observe(
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

    def differ(self, base: tuple[str, str], mutant: tuple[str, str], shot: Shot, deadline: float = DEADLINE) -> bool:
        """Whether the case tells the mutant from what it was made from; both as subject and hash of its sources."""
        if not is_asked(base[0], shot.case):
            return False
        result = self.run(*mutant, shot, deadline)
        about_ends = bool(shot.case.may) and result.outcomes != BROKE_OFF
        if not result.broken and not about_ends:
            return False
        sound = self.run(*base, shot, deadline)
        ended_well = all(permitted(outcome, shot.case.may) for outcome in sound.outcomes)
        # A case may state a law only where it is false, so one that is not among the original's counts if that came to an end.
        told = set(result.broken) - set(sound.broken)
        if told if ended_well else told & set(sound.laws):
            return True
        return about_ends and ended_well and result.outcomes != sound.outcomes

    def holds(self, subject: str, sources: str, shot: Shot) -> bool:
        """Whether the subject conforms here, so that a defect of it could be told from its own."""
        result = self.run(subject, sources, shot)
        return not result.broken and all(permitted(outcome, shot.case.may) for outcome in result.outcomes)

    def judged(self) -> Iterator[Result]:
        """What this run rests on, kept results of other sources left out."""
        return (self.results.known[key] for key in self.used if key in self.results.known)

    def close(self) -> None:
        for suite in self._all:
            suite.close()

    def _suite(self) -> Suite:
        if not hasattr(self._suites, "own"):
            self._suites.own = Suite(self.settings)
            self._all.append(self._suites.own)
        own: Suite = self._suites.own
        return own


@cache
def _machinery() -> list[str]:
    """What decides how a subject is reached and how its ranks end, beside what the hash of a program covers."""
    here = Path(ranks.__file__).parent
    return [source_hash(here / name) for name in ("job.py", "ranks.py", "server.py", "subject.py")]


def _ran_out_of_time(result: Result, case: Case) -> bool:
    return "waiting" in result.outcomes and "hang" not in case.may


def is_asked(subject: str, case: Case) -> bool:
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


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
