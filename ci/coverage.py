"""
Account for DDP's documentation, sentence by sentence.

    python -m ci.coverage              every sentence of the installed torch, with its claims, its reason or PENDING
    python -m ci.coverage --pending    only those that nothing accounts for

`conformance/documented.toml` maps the fingerprint of a sentence to claims or to a reason; the sentences themselves are
read from the installed torch and stored nowhere. Exits 1 when a sentence is pending or the map is wrong.
"""

import argparse
import signal
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ddp_conformance import golden
from ddp_conformance.case import MUST, Case

from ci import sources
from ci.cases import CONFORMANCE, all_cases
from ci.documentation import Sentence, sentences

MAP = CONFORMANCE / "documented.toml"
REASONS = ("example code", "advice", "performance", "cross-reference", "another API")
PROMISES = ("must", "will", "only", "never", "raises", "default", "averaged", "broadcast")
"""A sentence with one of these words says what happens, so it is not advice."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.coverage", description="Account for DDP's documentation.")
    parser.add_argument("--pending", action="store_true", help="only the sentences that nothing accounts for")
    options = parser.parse_args(arguments)
    known = sentences()
    try:
        accounted = load(MAP)
    except ValueError as error:
        print(f"ci.coverage: {error}", file=sys.stderr)
        return 2
    pending = 0
    owner = ""
    for sentence in known:
        status = describe(accounted.get(sentence.fingerprint))
        pending += status == "PENDING"
        if options.pending and status != "PENDING":
            continue
        if sentence.owner != owner:
            owner = sentence.owner
            print(f"\n{owner}")
        print(f"  {sentence.fingerprint}  {status}\n      {sentence.text}")
    wrong = list(errors(accounted, known, all_cases()))
    for line in wrong:
        print(f"error: {line}")
    tested = sum("claims" in accounted.get(sentence.fingerprint, {}) for sentence in known)
    print(
        f"\ntorch {torch.__version__}: {len(known)} sentences, {tested} tested, {len(known) - tested - pending} not "
        f"testable, {pending} pending"
    )
    return 1 if pending or wrong else 0


def load(path: Path) -> dict[str, Any]:
    """Fingerprint -> {claims = [...]} or {reason = "..."}; raises ValueError, in one line, for anything else."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise ValueError(f"{path.name}: not a TOML file: {golden.one_line(str(error))}") from error
    for key, entry in table.items():
        fingerprint = golden.one_line(key)
        if not isinstance(entry, dict) or len(entry) != 1 or not ({"claims", "reason"} & entry.keys()):
            raise ValueError(f"{path.name}: {fingerprint}: write claims = [...] or reason = ...")
        if "reason" in entry and entry["reason"] not in REASONS:
            raise ValueError(f"{path.name}: {fingerprint}: reason {entry['reason']!r} is none of {', '.join(REASONS)}")
        claims = entry.get("claims", [""])
        if not (isinstance(claims, list) and claims and all(isinstance(claim, str) for claim in claims)):
            raise ValueError(f"{path.name}: {fingerprint}: claims is a list with at least one claim id, each a string")
    return table


def describe(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "PENDING"
    return ", ".join(entry["claims"]) if "claims" in entry else f"({entry['reason']})"


def errors(accounted: Mapping[str, Any], known: Collection[Sentence], cases: Collection[Case]) -> Iterator[str]:
    """What is wrong with the map: claims that do not exist, promises called advice, MUST claims that nothing supports."""
    claims = {case.claim for case in cases}
    for fingerprint, entry in accounted.items():
        for claim in entry.get("claims", ()):
            if claim not in claims:
                yield f"{fingerprint} maps to {claim}, which is no claim"
    for sentence in known:
        if accounted.get(sentence.fingerprint, {}).get("reason") == "advice":
            words = {word.strip(".,;:()").lower() for word in sentence.text.split()}
            if promised := sorted(words.intersection(PROMISES)):
                yield f"{sentence.fingerprint} is called advice and says {', '.join(promised)}"
    supported = {claim for entry in accounted.values() for claim in entry.get("claims", ())}
    for case in {case.claim: case for case in cases if case.level == MUST}.values():
        if case.claim not in supported and not sources.is_line(case.source):
            yield f"{case.claim} is MUST, and no sentence and no named source line supports it"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
