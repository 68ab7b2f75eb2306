"""DDP's documentation as sentences: read from the installed torch, identified by fingerprints, never stored."""

import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OBJECTS = (
    "torch.nn.parallel:DistributedDataParallel",
    "torch.nn.parallel:DistributedDataParallel.no_sync",
    "torch.nn.parallel:DistributedDataParallel.join",
    "torch.nn.parallel:DistributedDataParallel.join_hook",
    "torch.nn.parallel:DistributedDataParallel.register_comm_hook",
    # What follows is private by name, and documented all the same: cases rest on these docstrings.
    "torch.nn.parallel:DistributedDataParallel._register_buffer_comm_hook",
    "torch.nn.parallel:DistributedDataParallel._register_builtin_comm_hook",
    "torch.nn.parallel:DistributedDataParallel._register_fused_optim",
    "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.nn.parallel:DistributedDataParallel._get_data_parallel_params",
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "torch.nn.parallel:DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
    "torch.nn.parallel:DistributedDataParallel._set_static_graph",
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized",
    "torch.nn.parallel:DistributedDataParallel._update_process_group",
    "torch.nn.parallel:DistributedDataParallel._set_ddp_sink_clone",
    "torch.nn.parallel.distributed:_MixedPrecision",
)
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
HOOK_MODULES = (
    "default_hooks",
    "powerSGD_hook",
    "post_localSGD_hook",
    "quantization_hooks",
    "debugging_hooks",
    "ddp_zero_hook",
    "optimizer_overlap_hooks",
    "mixed_precision_hooks",
)
ROLES = re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^`]*>)?`")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|resp|Eq|Fig)\.")
HEADING = re.compile(r"^[\w ,.]+(\([^)]*\))?:$|^\w+ \([^)]*\): |^\w+: ")
"""An argument's name and type, before its description or alone."""
SENTENCE_END = re.compile(r"(?<!default:)(?<=[.!?:])\s+(?=[A-Z\"'(0-9])")


@dataclass(frozen=True)
class Sentence:
    """One sentence of the documentation, and whose it is."""

    owner: str
    text: str

    @property
    def fingerprint(self) -> str:
        """Survives reflowing, mark-up and punctuation, and nothing that changes a word."""
        words = re.findall(r"[a-z0-9_.]*[a-z0-9_]", self.text.lower())
        return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def sentences() -> list[Sentence]:
    """Every sentence in the order of the documentation; one that stands twice is listed where it stands first."""
    found: dict[str, Sentence] = {}
    for owner, docstring in _docstrings():
        for text in split(docstring):
            sentence = Sentence(owner, text)
            found.setdefault(sentence.fingerprint, sentence)
    return list(found.values())


def split(docstring: str) -> list[str]:
    """
    The sentences of one docstring, mark-up dropped.

    Example code (doctest lines and what is indented below `::`) is no sentence. A paragraph, a list item and an
    argument's description each begin a sentence of their own.
    """
    texts: list[str] = []
    for paragraph in _paragraphs(inspect.cleandoc(docstring)):
        plain = ROLES.sub(r"\1", paragraph).replace("``", "").replace("`", "").replace("*", "")
        plain = ABBREVIATIONS.sub(lambda match: match.group(1).replace(".", "\0") + "\0", plain)
        for piece in SENTENCE_END.split(plain):
            text = HEADING.sub("", piece.replace("\0", ".").strip())
            if len(re.findall(r"[A-Za-z]{2,}", text)) > 1:
                texts.append(text)
    return texts


def _paragraphs(docstring: str) -> Iterator[str]:
    """Blocks of prose: separated by blank lines, directives, list items, or the start of an argument's description."""
    block: list[str] = []
    code_indent: int | None = None
    for line in [*docstring.splitlines(), ""]:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if code_indent is not None:
            if not stripped or indent > code_indent:
                continue
            code_indent = None
        starts = re.match(r"(\.\. |[-*] |\d\) |\d\. |>>>|\w+ \([^)]*\):|\w+: )", stripped)
        if (not stripped or starts) and block:
            yield " ".join(block)
            block = []
        if not stripped or stripped.startswith((">>>", "...")):
            continue
        if stripped.startswith(".. "):
            name, _, rest = stripped[3:].partition("::")
            if name in ("code", "code-block", "math", "list-table"):
                code_indent = indent
                continue
            stripped = rest.strip()
        stripped = re.sub(r"^([-*]|\d[.)]) ", "", stripped)
        if stripped.endswith("::"):
            code_indent = indent
            stripped = stripped[:-1]
        if stripped:
            block.append(stripped)
    if block:
        yield " ".join(block)


def _docstrings() -> Iterator[tuple[str, str]]:
    for name in OBJECTS:
        module, _, path = name.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        docstring = getattr(found, "__doc__", None)
        if docstring:
            yield path, docstring
    for short in HOOK_MODULES:
        try:
            module_object = importlib.import_module(f"{HOOKS}.{short}")
        except ImportError:  # an older torch has fewer hooks
            continue
        if module_object.__doc__:
            yield short, module_object.__doc__
        for name, value in sorted(vars(module_object).items()):
            if name.startswith("_") or getattr(value, "__module__", None) != module_object.__name__:
                continue
            if inspect.isfunction(value) and value.__doc__:
                yield f"{short}.{name}", value.__doc__
            elif inspect.isclass(value):
                if value.__doc__:
                    yield f"{short}.{name}", value.__doc__
                for member, method in sorted(vars(value).items()):
                    if inspect.isfunction(method) and method.__doc__:
                        yield f"{short}.{name}.{member}", method.__doc__
