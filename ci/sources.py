"""Where torch promises or does what a case claims: a source must resolve in the installed torch."""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

PREFIXES = (
    "torch.nn.parallel.",
    "torch.nn.parallel.distributed.",
    "torch.distributed.",
    "torch.distributed.algorithms.",
    "torch.distributed.algorithms.ddp_comm_hooks.",
    "torch.",
    "",
)


def resolve(source: str) -> Any:
    """
    The object that a dotted source names, or the path of the file in which its line stands.

    Raises LookupError, in one line, when this torch has neither.
    """
    file, colon, line = source.partition(": ")
    if not colon:
        for prefix in PREFIXES:
            found = _object(prefix + source)
            if found is not None:
                return found
        raise LookupError(f"source {source!r} does not resolve by import in torch {torch.__version__}")
    path = Path(torch.__file__).parent / file
    if not path.exists():
        raise LookupError(f"source {source!r}: torch {torch.__version__} has no file {file}")
    if " ".join(line.split()) not in _text(path):
        raise LookupError(f"source {source!r}: the line does not stand in {file} of torch {torch.__version__}")
    return path


def is_line(source: str) -> bool:
    """Whether the source is a file and a searched-for line, which no sentence of the documentation need support."""
    return ": " in source


@cache
def _text(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8", errors="replace").split())


def _object(dotted: str) -> Any:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
            if found is None:
                return None
        return found
    return None
