"""
Run the suite on releases of torch, each in a throw-away environment, one after the other, and keep the records. While
one runs the next one's environment is made: two at a time, 5 GB of disk each.

    python -m ci.matrix                               every release in ci/versions.toml
    python -m ci.matrix --versions 2.0.1,2.4.1        these; "nightly" is the newest build in the index TORCH_INDEX
    python -m ci.matrix --list-json                   what a nightly run measures, as JSON for a CI matrix
    python -m ci.matrix --gather DIR                  after it: leave a reason below DIR for each job without a whole record

Safe to interrupt: a release whose whole record is there is not run again (a nightly is). An environment that cannot be
built, or a run that breaks off, is no data with its reason, in RECORDS/VERSION.nodata; it is never a failure of torch.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.record import Record, RecordError
from ddp_conformance.subject import DEFAULT
from packaging.version import InvalidVersion, Version

from ci.cases import ROOT
from ci.environments import NIGHTLY, Broke, install, last_line, one_ahead, require_gpus

VERSIONS = ROOT / "ci" / "versions.toml"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.matrix", description="Run the suite on releases of torch.")
    parser.add_argument("--versions", metavar="V,V", help="only these releases; any release that uv can install")
    parser.add_argument("--records", type=Path, default=Path("records"), metavar="DIR", help="where records are kept")
    parser.add_argument("--lane", action="append", default=[], metavar="BACKEND:DEVICE")
    parser.add_argument("--subject", metavar="MODULE:NAME")
    parser.add_argument("--python", metavar="X.Y", help="default: the one in ci/versions.toml")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="no run where torch finds fewer GPUs")
    parser.add_argument("--keep", action="store_true", help="keep the environments, below the records")
    parser.add_argument("--list-json", action="store_true", help="print what a nightly run measures and stop")
    parser.add_argument("--gather", type=Path, metavar="DIR", help="name what has no record in DIR/NAME/ and stop")
    options = parser.parse_args(arguments)
    known = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))
    if options.list_json:
        print(json.dumps({"include": jobs(known)}))
        return 0
    if options.gather:
        for line in gather(jobs(known), options.gather):
            print(line)
        return 0
    python = options.python or known["python"]
    versions = options.versions.split(",") if options.versions is not None else list(known["releases"])
    for version in versions:
        if wrong := refused(version, python, options.records, options.subject or DEFAULT, options.lane):
            parser.error(wrong)
    extra = [f"--lane={lane}" for lane in options.lane] + ([f"--subject={options.subject}"] if options.subject else [])
    options.records.mkdir(parents=True, exist_ok=True)
    paths = {version: options.records / f"{version}.jsonl" for version in versions}
    there = {version: found for version in paths if (found := kept(paths[version], version))}
    absent = [version for version in paths if version not in there]
    bad = 0

    def make(version: str, home: Path) -> Path:
        interpreter = install(version, python, known["releases"].get(version, []), home)
        if options.gpus:
            require_gpus(options.gpus, interpreter)
        return interpreter

    with closing(one_ahead(absent, make, options.records if options.keep else None)) as made:
        for number, version in enumerate(paths, 1):
            print(f"[{number}/{len(paths)}] torch {version}: ", end="", flush=True)
            began = time.monotonic()
            try:
                found = there.get(version) or measure(version, next(made).result(), paths[version], extra)
                bad += not conforms(found)
                print(f"{summary(found)} ({time.monotonic() - began:.0f} s)", flush=True)
            except Broke as error:
                paths[version].unlink(missing_ok=True)  # what there is of it is none of this torch
                paths[version].with_suffix(".nodata").write_text(f"{error}\n", encoding="utf-8")
                print(f"no data: {error}")
                bad += 1
    return 1 if bad else 0


def jobs(known: dict[str, Any]) -> list[dict[str, str]]:
    """What a nightly run measures, one job each: every release, and the newest torch on the newest Python."""
    pairs = [(torch, known["python"]) for torch in known["releases"]]
    pairs += [(torch, known["newest"]["python"]) for torch in known["newest"]["torch"]]
    return [{"name": f"{torch}-python{python}", "torch": torch, "python": python} for torch, python in pairs]


def gather(expected: Sequence[dict[str, str]], folder: Path) -> Iterator[str]:
    """Leave a reason in FOLDER/NAME/ for each job without a whole record and a reason of its own: it died, or was cut short."""
    for job in expected:
        path = folder / job["name"] / f"{job['torch']}.jsonl"
        try:
            record.read(path)
        except RecordError as error:
            why = str(error).removeprefix(f"{path}: ") if path.exists() else "its job left no record and no reason"
            reason = path.with_suffix(".nodata")
            if not reason.exists():
                reason.parent.mkdir(parents=True, exist_ok=True)
                reason.write_text(f"{why}\n", encoding="utf-8")
            path.unlink(missing_ok=True)
            yield f"{job['name']}: no data: {reason.read_text(encoding='utf-8').strip()}"


def refused(version: str, python: str, records: Path, subject: str, lanes: Sequence[str]) -> str | None:
    """Why a release cannot be measured into this folder: it is none, or what is on record there is of something else."""
    try:
        Version("0" if version == NIGHTLY else version)
    except InvalidVersion:
        return f"--versions: {version!r} is no release of torch"
    path = records / f"{version}.jsonl"
    try:
        run = record.read(path).run
    except RecordError:
        return None
    there = str(run.get("python", python))
    same_python = f"{there}.".startswith(f"{python}.")
    if run["subject"] == subject and (not lanes or set(lanes) == set(run["lanes"])) and same_python:
        return None
    what = f"{run['subject']} on {' '.join(run['lanes'])}, Python {there}"
    return f"{path} is of {what}: name another folder by --records"


def kept(path: Path, version: str) -> Record | None:
    """The whole record that is there; what was cut short, is another torch's, or last night's, is removed."""
    try:
        if version != NIGHTLY:
            return _checked(path, version)
    except (Broke, RecordError):
        pass
    path.unlink(missing_ok=True)
    path.with_suffix(".nodata").unlink(missing_ok=True)
    return None


def measure(version: str, interpreter: Path, path: Path, extra: Sequence[str]) -> Record:
    """The record of one release, by a run in the environment that was made for it."""
    command = [str(interpreter), "-m", "pytest", "-n", "auto", "-q", f"--record={path.resolve()}", *extra]
    # uv compiles nothing: each of the run's processes that imports torch would, unless the first may keep what it compiled.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not path.exists():
        raise Broke(f"pytest ended with {done.returncode}: {last_line(done)}")
    try:
        return _checked(path, version)
    except RecordError as error:
        raise Broke(str(error)) from error


def conforms(found: Record) -> bool:
    """Whether nothing on record needs a person: no case violated or changed, and none that broke off."""
    return found.whole_suite and all(line["verdict"] not in ("violated", "changed") for line in found.cases)


def summary(found: Record) -> str:
    counts: dict[str, int] = {}
    for line in found.cases:
        counts[line["verdict"]] = counts.get(line["verdict"], 0) + 1
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))


def _checked(path: Path, version: str) -> Record:
    """The record, if it is whole and of the torch that was asked for."""
    found = record.read(path)
    ran = Version(found.run["torch"])
    if not (ran.is_devrelease if version == NIGHTLY else golden.release(str(ran)) == golden.release(version)):
        raise Broke(f"asked for torch {version}, and {found.run['torch']} ran")
    if not found.end["complete"]:
        raise Broke(f"{path.name}: the run was not completed")
    return found


if __name__ == "__main__":
    sys.exit(main())
