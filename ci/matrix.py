"""
Run the suite on releases of torch, each in a throw-away environment, one after the other, and keep the records.

    python -m ci.matrix                               every release in ci/versions.toml
    python -m ci.matrix --versions 2.0.1,2.4.1        these
    python -m ci.matrix --list-json                   the releases as JSON, for a CI matrix

Safe to interrupt: a release whose whole record is there is not run again. An environment that cannot be built, or a run
that breaks off, is no data with its reason, in RECORDS/VERSION.nodata; it is never a failure of torch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.record import Record, RecordError
from ddp_conformance.subject import DEFAULT
from packaging.version import InvalidVersion, Version

from ci.cases import ROOT

VERSIONS = ROOT / "ci" / "versions.toml"


class Broke(Exception):
    """No data for this release: the environment or the run broke off."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.matrix", description="Run the suite on releases of torch.")
    parser.add_argument("--versions", metavar="V,V", help="only these releases; any release that uv can install")
    parser.add_argument("--records", type=Path, default=Path("records"), metavar="DIR", help="where records are kept")
    parser.add_argument("--lane", action="append", default=[], metavar="BACKEND:DEVICE")
    parser.add_argument("--subject", metavar="MODULE:NAME")
    parser.add_argument("--keep", action="store_true", help="keep the environments, below the records")
    parser.add_argument("--list-json", action="store_true", help="print the releases as JSON and stop")
    options = parser.parse_args(arguments)
    known = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))
    if options.list_json:
        print(json.dumps({"torch": list(known["releases"])}))
        return 0
    versions = options.versions.split(",") if options.versions is not None else list(known["releases"])
    for version in versions:
        if wrong := refused(version, options.records, options.subject or DEFAULT, options.lane):
            parser.error(wrong)
    extra = [f"--lane={lane}" for lane in options.lane] + ([f"--subject={options.subject}"] if options.subject else [])
    options.records.mkdir(parents=True, exist_ok=True)
    bad = 0
    for number, version in enumerate(versions, 1):
        print(f"[{number}/{len(versions)}] torch {version}: ", end="", flush=True)
        began = time.monotonic()
        try:
            found = measure(version, known, options.records, extra, keep=options.keep)
            bad += not conforms(found)
            print(f"{summary(found)} ({time.monotonic() - began:.0f} s)")
        except Broke as error:
            (options.records / f"{version}.nodata").write_text(f"{error}\n", encoding="utf-8")
            print(f"no data: {error}")
            bad += 1
    return 1 if bad else 0


def refused(version: str, records: Path, subject: str, lanes: Sequence[str]) -> str | None:
    """Why a release cannot be measured into this folder: it is none, or what is on record there is of something else."""
    try:
        Version(version)
    except InvalidVersion:
        return f"--versions: {version!r} is no release of torch"
    path = records / f"{version}.jsonl"
    try:
        run = record.read(path).run
    except RecordError:
        return None
    if run["subject"] == subject and (not lanes or set(lanes) == set(run["lanes"])):
        return None
    return f"{path} is of {run['subject']} on {' '.join(run['lanes'])}: name another folder by --records"


def measure(version: str, known: dict[str, Any], records: Path, extra: Sequence[str], *, keep: bool) -> Record:
    """The record of one release: the one that is there and whole, or that of a run in an environment made for it."""
    path = records / f"{version}.jsonl"
    if path.exists():
        try:
            return _checked(path, version)
        except (Broke, RecordError):
            path.unlink()  # cut short by an interruption, or another torch's
    (records / f"{version}.nodata").unlink(missing_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"torch-{version}-", dir=records if keep else None))
    try:
        python = install(version, known, home)
        command = [str(python), "-m", "pytest", "-n", "auto", "-q", f"--record={path.resolve()}", *extra]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not path.exists():
            raise Broke(f"pytest ended with {done.returncode}: {_last_line(done)}")
        return _checked(path, version)
    except RecordError as error:
        raise Broke(str(error)) from error
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def install(version: str, known: dict[str, Any], home: Path) -> Path:
    """A Python with this torch, what it needs beside it, and the suite; with a cache that goes when it goes."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise Broke("uv is not installed: pip install -e '.[dev]'")
    python = home / "env" / "bin" / "python"
    beside = known["releases"].get(version, [])
    for command in (
        [uv, "venv", "--quiet", "--python", known["python"], str(home / "env")],
        [uv, "pip", "install", "--quiet", "--python", str(python), f"torch=={version}", *beside, "-e", str(ROOT)],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "UV_CACHE_DIR": str(home / "cache")}
        )
        if done.returncode:
            raise Broke(f"uv ended with {done.returncode}: {_last_line(done)}")
    return python


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
    if golden.release(found.run["torch"]) != golden.release(version):
        raise Broke(f"asked for torch {version}, and {found.run['torch']} ran")
    if not found.end["complete"]:
        raise Broke(f"{path.name}: the run was not completed")
    return found


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr + "\n" + done.stdout).strip().splitlines()
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
