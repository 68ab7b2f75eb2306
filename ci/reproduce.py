"""
Print a case as one standalone script: no pytest, no fixture, only torch; to step through, or to paste into a report.

    python -m ci.reproduce no_sync.accumulates                     print it
    python -m ci.reproduce rank0_broadcast.buffers/w3 --torch 2.4.1   with what that release does, and what is expected

The script holds the suite's own sources that the case needs and the case as it stands, and starts plain processes; under
`torchrun` it takes the ranks that it is given.
"""

import argparse
import ast
import sys
from pathlib import Path

import ddp_conformance
from ddp_conformance import golden, record
from ddp_conformance.case import Case, Facet
from ddp_conformance.ranks import CASE_DEADLINE, GROUP_TIMEOUT
from ddp_conformance.suite import golden_path

from ci import diff
from ci.cases import all_cases

PACKAGE = Path(ddp_conformance.__file__ or "").parent
NEEDED = ("facts", "subject", "rank", "models", "reference")

START = r'''
def _main(index, world_size, path):
    """One rank: join the group, run the case, print what it shows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{index % max(1, torch.cuda.device_count())}")
    if GROUP:
        timeout = datetime.timedelta(seconds=TIMEOUT)
        if path is None:
            dist.init_process_group(BACKEND, timeout=timeout)
        else:
            store = dist.FileStore(path, world_size)
            dist.init_process_group(BACKEND, store=store, rank=index, world_size=world_size, timeout=timeout)

    def tell(said):
        if "fact" in said:
            sys.stdout.write(f"rank {index}: {said['fact']} = {said['text']}\n")
        elif "law" in said:
            verdict = "holds" if said["holds"] else f"BROKEN\n{said['detail']}\n"
            sys.stdout.write(f"rank {index}: law {said['law']}: {verdict}\n")
        sys.stdout.flush()

    PROGRAM(Rank(index, world_size, device, Subject(SUBJECT), tell), *VALUE)
    if GROUP and not MAY:
        dist.barrier()  # a rank that leaves while a peer still talks makes gloo fail there
    os._exit(0)  # interpreter exit with live gloo threads can abort


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(ENVIRONMENT)
    if "RANK" in os.environ:
        _main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_main, (WORLD, os.path.join(folder, "store")), nprocs=WORLD)
'''


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.reproduce", description="Print a case as a standalone script.")
    parser.add_argument("case", metavar="CASE", help="a case id; a claim stands for its first case")
    parser.add_argument("--torch", metavar="RELEASE", help="say what this release does and what is expected of it")
    parser.add_argument("--lane", default="gloo:cpu", metavar="BACKEND:DEVICE")
    options = parser.parse_args(arguments)
    try:
        if not all(options.lane.rpartition(":")):
            raise LookupError(f"--lane {options.lane}: write backend:device, such as gloo:cpu")
        case, facet = find(options.case)
        print(script(case, facet, options.lane, options.torch))
    except (LookupError, ValueError, record.RecordError, golden.GoldenError) as error:
        print(f"ci.reproduce: {error.args[0]}", file=sys.stderr)
        return 2
    return 0


def find(name: str) -> tuple[Case, Facet]:
    """The case of this id, or the first one of this claim."""
    for case in all_cases():
        for facet in case.facets():
            if name in (case.id(facet), case.claim):
                return case, facet
    raise LookupError(f"no case {name!r}: see pytest --list")


def script(case: Case, facet: Facet, lane: str, release: str | None) -> str:
    """The whole script: head, the sources it needs, the case, the start."""
    backend, _, device = lane.rpartition(":")
    parts = [head(case, facet, lane, release)]
    module = ast.parse(case.path.read_text(encoding="utf-8"))
    names = NEEDED if _mentions(module, "reference") else [name for name in NEEDED if name != "reference"]
    for name in names:
        path = PACKAGE / f"{name}.py"
        if path.exists():
            parts.append(f"# ---- {name}.py\n\n{source(path)}")
            # The modules say `facts.text`; here everything stands in one.
            parts.append(f"{name} = sys.modules[__name__]")
    parts.append(f"# ---- the case\n\n{source(case.path, only=case.program.__name__)}")
    values = {
        "PROGRAM": case.program.__name__,
        "VALUE": f"(EACH[{facet.key!r}],)" if facet.key is not None else "()",
        "WORLD": facet.world,
        "BACKEND": repr(backend),
        "DEVICE": repr(device),
        "SUBJECT": repr("torch.nn.parallel:DistributedDataParallel"),
        "GROUP": case.group,
        "MAY": case.may,
        "TIMEOUT": case.group_timeout or GROUP_TIMEOUT,
        "ENVIRONMENT": dict(case.env),
    }
    if facet.key is not None:
        parts.append(f"EACH = {_each(module, case.program.__name__)}")
    parts.append("\n".join(f"{name} = {value}" for name, value in values.items()))
    parts.append(START.strip())
    return "\n\n\n".join(parts)


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
        expected = golden.expected(golden.load(golden_path(case)), case_id.partition(".")[2], lane, release)
        seen = [line for line in diff.find(release).cases if (line["id"], line["lane"]) == (case_id, lane)]
        for line in seen:
            lines += ["", f"On torch {release} this is {line['verdict']}. {line['why']}".rstrip()]
            lines += [f"    {name} = {value}" for name, value in line["facts"].items()]
        if not seen:
            lines += ["", f"On torch {release} this was never measured."]
        lines += ["", "Expected there:", *(f"    {name} = {value}" for name, (value, _) in expected.facts.items())]
    told = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    imports = (
        "import datetime\nimport os\nimport sys\nimport tempfile\n\nimport torch\nimport torch.distributed as dist"
    )
    return f'"""\n{told}\n"""\n\n{imports}'


def source(path: Path, only: str | None = None) -> str:
    """A module's source without its docstring and the suite's own imports; of its cases, the one asked for, undecorated."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = []
    for node in ast.parse("\n".join(lines)).body:
        first = node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_conformance"):
            kept += [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
            continue
        if isinstance(node, ast.FunctionDef) and _is_case(node):
            if node.name != only:
                continue
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        kept.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n".join(kept)


def _is_case(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "case"
        for decorator in node.decorator_list
    )


def _each(module: ast.Module, name: str) -> str:
    """The source of the case's `each`."""
    for node in ast.parse(ast.unparse(module)).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for decorator in node.decorator_list:
                for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    if keyword.arg == "each":
                        return ast.unparse(keyword.value)
    raise LookupError(f"{name} declares no facets")


def _mentions(module: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == f"ddp_conformance.{name}" for node in ast.walk(module)
    )


if __name__ == "__main__":
    sys.exit(main())
