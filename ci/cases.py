"""Every case of the suite, read from the case modules themselves."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

from ddp_conformance.case import Case

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = ROOT / "conformance"


@cache
def all_cases(folder: Path = CONFORMANCE) -> tuple[Case, ...]:
    """The cases of every module, modules by name and cases as they stand in them."""
    found: dict[int, Case] = {}
    for path in sorted(folder.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"conformance.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for value in vars(module).values():
            known = getattr(value, "case", None)
            if isinstance(known, Case) and known.path == path:
                found[id(known)] = known
    return tuple(found.values())


def families() -> dict[str, list[Case]]:
    """Cases by claim family, in the order of their modules."""
    by_family: dict[str, list[Case]] = {}
    for case in all_cases():
        by_family.setdefault(case.family, []).append(case)
    return by_family


def introduction(case: Case) -> str:
    """The first paragraph of the docstring of the case's module: what the family is about."""
    text = sys.modules[case.program.__module__].__doc__ or ""
    return " ".join(text.strip().split("\n\n")[0].split())
