"""
Print a case as one standalone script: no pytest, no fixture, only torch; to step through, or to paste into a report.

    python -m ci.reproduce no_sync.accumulates                     print it
    python -m ci.reproduce rank0_broadcast.buffers/w3 --torch 2.4.1   with what that release does, and what is expected
    python -m ci.reproduce no_sync.accumulates --subject yours:DDP    of another DDP than torch's
    python -m ci.reproduce --reports                               write the scripts in ci/reports anew

The script holds the suite's own sources that the case needs and the case as it stands, and starts plain processes; under
`torchrun` it takes the ranks that it is given. It ends with 1 where a law is broken.
"""

import argparse
import ast
import signal
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.case import Case, Facet
from ddp_conformance.ranks import CASE_DEADLINE, GROUP_TIMEOUT
from ddp_conformance.subject import DEFAULT
from ddp_conformance.suite import golden_path

from ci import diff, standalone
from ci.cases import all_cases

REPORTS = Path(__file__).parent / "reports"
"""Ready to send, and sent by nobody: a text for each claim that a release breaks and nobody has reported."""

IMPORTS = """
import datetime
import os
import sys
import tempfile
import time
import torch
import torch.distributed as dist
"""

START = r'''
def _main(index, world_size, path):
    """One rank: join the group, run the case, print what it shows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{index % max(1, torch.cuda.device_count())}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if GROUP:
        options = {"timeout": datetime.timedelta(seconds=max(TIMEOUT, RENDEZVOUS))}
        if path is not None:
            options.update(store=dist.FileStore(path, world_size), rank=index, world_size=world_size)
        dist.init_process_group(BACKEND, **options)
        store = dist.distributed_c10d._get_default_store()
        if TIMEOUT < RENDEZVOUS and hasattr(dist.distributed_c10d, "_set_pg_timeout"):
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), dist.group.WORLD)

    broken = []

    def tell(said):
        if "fact" in said:
            sys.stdout.write(f"rank {index}: {said['fact']} = {said['text']}\n")
        elif "law" in said:
            verdict = "holds" if said["holds"] else f"BROKEN\n{said['detail']}\n"
            broken.extend([] if said["holds"] else [said["law"]])
            sys.stdout.write(f"rank {index}: law {said['law']}: {verdict}\n")
        sys.stdout.flush()

    subject = Subject(SUBJECT)
    PROGRAM(Rank(index, world_size, device, subject, tell), *VALUE)
    if "hang" in MAY:
        tell({"fact": "outcome", "text": f"returned, and stays for {WAIT:.0f} s: a peer that waits fails once this one leaves"})
        time.sleep(WAIT)
    elif GROUP and not MAY:
        # A rank that leaves while a peer still talks makes gloo fail there; and a group that timed out has no barrier.
        store.set(f"left/{index}", "")
        store.wait([f"left/{each}" for each in range(world_size)])
    if broken and path is not None:
        open(f"{path}.broken", "w").close()  # a rank that fails would have the others ended
        broken.clear()
    os._exit(1 if broken else 0)  # interpreter exit with live gloo threads can abort


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != WORLD:
            sys.exit(f"this case is one of {WORLD} ranks: torchrun --nproc-per-node {WORLD}")
        _main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.start_processes(_main, (WORLD, store), nprocs=WORLD, start_method="fork")
        sys.exit(os.path.exists(f"{store}.broken"))
'''


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.reproduce", description="Print a case as a standalone script.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("case", metavar="CASE", nargs="?", help="a case id; a claim stands for its first case")
    what.add_argument("--reports", action="store_true", help="write the script beside each text in ci/reports anew")
    parser.add_argument("--torch", metavar="RELEASE", help="say what this release does and what is expected of it")
    parser.add_argument(
        "--subject", default=DEFAULT, metavar="PACKAGE.MODULE:NAME", help="the DDP that the script runs"
    )
    parser.add_argument("--lane", default="gloo:cpu", metavar="BACKEND:DEVICE")
    options = parser.parse_args(arguments)
    try:
        if not all(options.lane.rpartition(":")):
            raise LookupError(f"--lane {options.lane}: write backend:device, such as gloo:cpu")
        golden.release(options.torch or "0")  # raises for what is no release at all
        if options.reports:
            for text in REPORTS.glob("*.md"):
                text.with_suffix(".py").write_text(
                    script(*find(text.stem), options.lane, None) + "\n", encoding="utf-8"
                )
            return 0
        print(script(*find(options.case), options.lane, options.torch, options.subject))
    except (LookupError, ValueError, record.RecordError, golden.GoldenError) as error:
        print(f"ci.reproduce: {error.args[0]}", file=sys.stderr)
        return 2
    return 0


def find(name: str) -> tuple[Case, Facet]:
    """The case of this id, or the first one of this claim."""
    names: set[str] = set()
    for case in all_cases():
        for facet in case.facets():
            if name in (case.id(facet), case.claim):
                return case, facet
            names |= {case.id(facet), case.claim}
    near = get_close_matches(name, names, 1)
    raise LookupError(f"no case {name!r}: {f'did you mean {near[0]}?' if near else 'see pytest --list'}")


def script(case: Case, facet: Facet, lane: str, release: str | None, subject: str = DEFAULT) -> str:
    """The whole script: head, the sources it needs, the case, the start."""
    backend, _, device = lane.rpartition(":")
    name = case.program.__name__
    start = START.strip()
    if case.needs:
        needs = f"    for need in {case.needs!r}:\n        subject.need(need)\n"
        start = start.replace("    PROGRAM(", f"{needs}    PROGRAM(")
    values = {
        "PROGRAM": name,
        "VALUE": f"({_each(case)}[{facet.key!r}],)" if facet.key is not None else "()",
        "WORLD": facet.world,
        "BACKEND": repr(backend),
        "DEVICE": repr(device),
        "SUBJECT": repr(subject),
        "GROUP": case.group,
        "MAY": case.may,
        "WAIT": CASE_DEADLINE,
        "TIMEOUT": case.group_timeout or GROUP_TIMEOUT,
        "RENDEZVOUS": GROUP_TIMEOUT,
    }
    settings = "\n".join(f"{name} = {value}" for name, value in values.items())
    parts = [head(case, facet, lane, release)]
    if case.env:
        parts.append(f"import os\n\nos.environ.update({dict(case.env)!r})  # torch reads this as it is imported")
    parts += standalone.sections(case.path, name, IMPORTS, settings, start)
    return "\n\n\n".join([*parts, settings, start])


def head(case: Case, facet: Facet, lane: str, release: str | None) -> str:
    """What the script shows and, for a release, what is on record of it there."""
    case_id = case.id(facet)
    lines = [
        f"{case_id} on {facet.world} ranks, {lane} ({case.level})",
        "",
        case.sentence,
        "",
        f"Source: {case.source}",
    ]
    if case.may:
        lines.append(f"A rank may {' or '.join(case.may)}; wait {CASE_DEADLINE:.0f} s before calling it a hang.")
    if release:
        lines += [*seen(case_id, lane, release), *expected(case, case_id, lane, release)]
    told = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""\n{told}\n"""'


def seen(case_id: str, lane: str, release: str) -> Iterator[str]:
    """What is on record of this case on this release."""
    yield ""
    lines = [line for line in diff.find(release).cases if (line["id"], line["lane"]) == (case_id, lane)]
    if not lines:
        yield f"On torch {release} this was never measured."
    for line in lines:
        yield f"On torch {release} it was measured: {': '.join([line['verdict'], *line['why'].splitlines()[:1]])}"
        yield from _facts(line["facts"])


def expected(case: Case, case_id: str, lane: str, release: str) -> Iterator[str]:
    """What the golden file says of this case on this release."""
    told = golden.expected(golden.load(golden_path(case)), case_id.partition(".")[2], lane, release)
    yield ""
    if not told.known:
        yield f"What torch {release} should do is on no file."
    elif not told.offered:
        yield f"Expected of torch {release}: it does not offer this."
    else:
        yield f"Expected of torch {release}: {'a deviation that is on file' if told.broken else 'the claim holds'}."
        yield from (f"    {entry.what}: {entry.reference}" for entry in told.broken)
        yield from _facts({name: value for name, (value, _) in told.facts.items()})
    yield from told.notes


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        if name == "laws":
            continue  # how many ran says nothing to whoever runs this
        values = (
            {f" on rank {rank}": each for rank, each in enumerate(value)} if isinstance(value, list) else {"": value}
        )
        yield from (f"    {name}{where} = {each}" for where, each in values.items())


def _each(case: Case) -> str:
    """The source of the case's `each`."""
    for node in _statements(case.path):
        if isinstance(node, ast.FunctionDef) and node.name == case.program.__name__:
            for decorator in node.decorator_list:
                for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    if keyword.arg == "each":
                        return ast.unparse(keyword.value)
    raise LookupError(f"{case.program.__name__} declares no facets")


@cache
def _statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
