"""
Run the suite on releases of torch, each in a throw-away environment, one after the other, and keep the records.

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
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.record import Record, RecordError
from ddp_conformance.subject import DEFAULT
from packaging.version import InvalidVersion, Version

from ci.cases import ROOT

VERSIONS = ROOT / "ci" / "versions.toml"
NIGHTLY = "nightly"


class Broke(Exception):
    """No data for this release: the environment or the run broke off."""


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
        if options.gather.exists() and not options.gather.is_dir():
            parser.error(f"--gather {options.gather}: it is no folder")
        for line in gather(jobs(known), options.gather):
            print(line)
        return 0
    python = options.python or known["python"]
    versions = (
        [name.strip() for name in options.versions.split(",")]
        if options.versions is not None
        else list(known["releases"])
    )
    for version in versions:
        if wrong := refused(version, python, options.records, options.subject or DEFAULT, options.lane):
            parser.error(wrong)
    extra = [f"--lane={lane}" for lane in options.lane] + ([f"--subject={options.subject}"] if options.subject else [])
    try:
        options.records.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--records {options.records}: {error.strerror}: name a folder")
    bad = 0
    for number, version in enumerate(versions, 1):
        print(f"[{number}/{len(versions)}] torch {version}: ", end="", flush=True)
        began = time.monotonic()
        try:
            beside = needed_beside(version, known["releases"])
            found = measure(version, python, beside, options.records, extra, gpus=options.gpus, keep=options.keep)
            bad += not conforms(found)
            print(f"{summary(found)} ({time.monotonic() - began:.0f} s)", flush=True)
        except Broke as error:
            (options.records / f"{version}.jsonl").unlink(missing_ok=True)  # what there is of it is none of this torch
            (options.records / f"{version}.nodata").write_text(f"{error}\n", encoding="utf-8")
            print(f"no data: {error}")
            bad += 1
    return 1 if bad else 0


def needed_beside(version: str, releases: dict[str, list[str]]) -> list[str]:
    """What a release needs beside torch: what is written of it, or of another release of the same minor version."""
    if version == NIGHTLY:
        return []
    minor = Version(version).release[:2]
    alike = [beside for name, beside in releases.items() if Version(name).release[:2] == minor]
    return releases.get(version, alike[0] if alike else [])


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


def measure(
    version: str, python: str, beside: Sequence[str], records: Path, extra: Sequence[str], *, gpus: int, keep: bool
) -> Record:
    """The record of one release: the one that is there and whole, or that of a run in an environment made for it."""
    path = records / f"{version}.jsonl"
    if version == NIGHTLY:
        path.unlink(missing_ok=True)  # last night's is no longer the newest
    if path.exists():
        try:
            if (found := _checked(path, version)).whole_suite:
                return found
        except (Broke, RecordError):
            pass
        path.unlink()  # cut short by an interruption, or another torch's
    (records / f"{version}.nodata").unlink(missing_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"torch-{version}-", dir=records if keep else None))
    try:
        interpreter = install(version, python, beside, home)
        if gpus:
            require_gpus(gpus, interpreter)
        command = [str(interpreter), "-m", "pytest", "-n", "auto", "-q", f"--record={path.resolve()}", *extra]
        # uv compiles nothing: each of the run's processes that imports torch would, unless the first may keep what it compiled.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not path.exists():
            raise Broke(f"pytest ended with {done.returncode}: {_last_line(done)}")
        found = _checked(path, version)
        if done.returncode and conforms(found):
            raise Broke(f"pytest failed, and for no case on record: {_last_line(done)}")
        return found
    except RecordError as error:
        raise Broke(str(error)) from error
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def install(version: str, python: str, beside: Sequence[str], home: Path) -> Path:
    """A Python with this torch, what it needs beside it, and the suite; with a cache that goes when it goes."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise Broke("uv is not installed: pip install -e '.[dev]'")
    interpreter = home / "env" / "bin" / "python"
    pip = [uv, "pip", "install", "--quiet", "--python", str(interpreter)]
    commands = [[uv, "venv", "--quiet", "--python", python, str(home / "env")]]
    if version == NIGHTLY:
        index = os.environ.get("TORCH_INDEX")
        if not index:
            raise Broke("TORCH_INDEX is not set to the index of torch's nightly builds")
        # That index has nothing else that the suite needs; the second install keeps the torch that is there.
        commands += [[*pip, "--prerelease", "allow", "--index-url", index, "torch"], [*pip, "-e", str(ROOT)]]
    else:
        commands.append([*pip, f"torch=={version}", *beside, "-e", str(ROOT)])
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "UV_CACHE_DIR": str(home / "cache")}
        )
        if done.returncode:
            raise Broke(f"uv ended with {done.returncode}: {_last_line(done)}")
    return interpreter


def require_gpus(least: int, interpreter: Path) -> None:
    """Raise Broke where this torch finds fewer: with one GPU most cases of a world of two would be skipped in silence."""
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([str(interpreter), "-c", count], capture_output=True, text=True)
    if done.returncode:
        raise Broke(f"the GPUs cannot be counted: {_last_line(done)}")
    if (found := int(done.stdout.split()[-1])) < least:
        raise Broke(f"at least {least} GPUs are needed, and this torch finds {found}")


def conforms(found: Record) -> bool:
    """Whether nothing on record needs a person: no case violated, changed or broken off, and no lane without a verdict."""
    judged = {line["lane"] for line in found.cases if line["verdict"] != "no data"}
    return found.whole_suite and judged >= set(found.run["lanes"]) and not any(map(record.needs_a_person, found.cases))


def summary(found: Record) -> str:
    counts: dict[str, int] = {}
    for line in found.cases:
        counts[line["verdict"]] = counts.get(line["verdict"], 0) + 1
    told = [f"{count} {verdict}" for verdict, count in sorted(counts.items())]
    if not found.whole_suite:
        told.append(f"judged {found.end['judged']} of {found.end['collected']} cases")
    return ", ".join(told)


def _checked(path: Path, version: str) -> Record:
    """The record, if it is whole and of the torch that was asked for."""
    found = record.read(path)
    ran = Version(found.run["torch"])
    if not (ran.is_devrelease if version == NIGHTLY else golden.release(str(ran)) == golden.release(version)):
        raise Broke(f"asked for torch {version}, and {found.run['torch']} ran")
    if not found.end["complete"]:
        raise Broke(f"{path.name}: the run was not completed")
    return found


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr + "\n" + done.stdout).strip().splitlines()
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
