"""Pytest runs over little suites of their own: written into a directory, started in a subprocess, read afterwards."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as xml
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKER = "SUITE_UNDER_TEST"
"""The variable whose value tells the processes of one run from all others, whoever their parent is by then."""

SETTINGS = """\
[pytest]
addopts = --import-mode=importlib --strict-markers --strict-config
xfail_strict = true
timeout = 100
"""


@dataclass(frozen=True)
class Told:
    """What JUnit says of one test."""

    outcome: str
    message: str
    properties: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    exit: int
    output: str
    folder: Path
    record: Path
    junit: Path

    @cached_property
    def cases(self) -> dict[str, dict[str, Any]]:
        """The record's case lines by id."""
        lines = map(json.loads, self.record.read_text().splitlines())
        return {line["id"]: line for line in lines if line["line"] == "case"}

    @cached_property
    def verdicts(self) -> dict[str, str]:
        return {name: line["verdict"] for name, line in self.cases.items()}

    @cached_property
    def told(self) -> dict[str, Told]:
        """What JUnit says, by case id (by test name where there is none)."""
        ids = {line["test"].rpartition("::")[2]: name for name, line in self.cases.items()}
        found = {}
        for case in xml.parse(self.junit).iter("testcase"):
            ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
            kind = ends[0].get("type", "") if ends else ""
            outcome = (
                "passed" if not ends else "xfailed" if kind == "pytest.xfail" else WORDS.get(ends[0].tag, ends[0].tag)
            )
            message = " ".join(filter(None, (ends[0].get("message"), ends[0].text))) if ends else ""
            properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
            found[ids.get(case.get("name", ""), case.get("name", ""))] = Told(outcome, message, properties)
        return found

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: told.outcome for name, told in self.told.items()}

    @property
    def counts(self) -> dict[str, int]:
        """The counts in pytest's last line."""
        last = next((line for line in reversed(self.output.splitlines()) if re.search(r" in [\d.]+s", line)), "")
        return {word.rstrip("s") if word == "errors" else word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}


WORDS = {"failure": "failed", "skipped": "skipped", "error": "error"}


@dataclass
class Running:
    """A run that has been started."""

    process: subprocess.Popen[bytes]
    marker: str
    log: Path
    folder: Path
    record: Path
    junit: Path

    def finish(self, within: float = 300) -> Run:
        try:
            code = self.process.wait(within)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        return Run(code, self.log.read_text(errors="replace"), self.folder, self.record, self.junit)

    def processes(self) -> dict[int, str]:
        return processes(self.marker)


@dataclass
class Little:
    """A little suite: case modules, golden files, and runs of them."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write("pytest.ini", SETTINGS)
        self.write("conftest.py", 'pytest_plugins = ["ddp_conformance.plugin"]\n')

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def start(
        self,
        *arguments: str,
        command: tuple[str, ...] = (sys.executable, "-m", "pytest"),
        places: tuple[str, ...] | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str | None] = {},
    ) -> Running:
        """Start pytest over the suite; a variable given as None is unset."""
        marker = uuid.uuid4().hex
        out = self.folder.parent / f"{self.folder.name}.runs" / marker
        temporary = out / "tmp"
        temporary.mkdir(parents=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCH_", "CI"))}
        given = {
            **clean,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "fixtures"), str(ROOT))),
            "TMPDIR": str(temporary),
            MARKER: marker,
            **self.environment,
            **environment,
        }
        whole = [
            *command,
            *(places if places is not None else ("." if cwd is None else str(self.folder),)),
            f"--record={out / 'record.jsonl'}",
            f"--junitxml={out / 'junit.xml'}",
            *arguments,
        ]
        with open(out / "log", "wb") as log:
            process = subprocess.Popen(
                whole,
                cwd=cwd or self.folder,
                env={name: value for name, value in given.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return Running(process, marker, out / "log", self.folder, out / "record.jsonl", out / "junit.xml")

    def run(self, *arguments: str, **more: Any) -> Run:
        return self.start(*arguments, **more).finish()


def processes(marker: str) -> dict[int, str]:
    """The processes of the run with this marker that are alive, each with what it is; a zombie, which only waits to be reaped, is not."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARKER}={marker}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    name, state, of = stat(int(entry.name))
                    if state != "Z":
                        found[int(entry.name)] = f"{name} {state}, child of {of}: {command(int(entry.name))}"
            except OSError:
                continue
    return found


def stat(pid: int) -> tuple[str, str, int]:
    """The name, the state and the parent of a process."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    state, of = rest.split()[:2]
    return name, state, int(of)


def parent(pid: int) -> int:
    """The parent of a process, 0 for one that has ended since it was found."""
    try:
        return stat(pid)[2]
    except OSError:
        return 0


def servers(marker: str) -> list[int]:
    """The rank servers of a run: ranks have the same command line, and a server for parent."""
    ours = {pid: parent(pid) for pid in processes(marker) if "server.py" in command(pid)}
    return [pid for pid, of in ours.items() if of and of not in ours]


def command(pid: int) -> str:
    """The command line of a process, empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def until(look: Callable[[], Any], *, within: float = 10, what: str = "it") -> Any:
    """What `look` returns as soon as that is true; an AssertionError when it is not within so many seconds."""
    end = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < end, f"{what} did not happen within {within} s"
        time.sleep(0.02)
    return found
