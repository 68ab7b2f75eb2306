"""
The suite's own sources cut down to what one case reaches, and put into one namespace.

A source is cut into its top-level statements; of the two classes that a case only ever calls by name, into methods too.
What is reached is found by name: a statement by the names it binds, a method by any attribute of its name.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ddp_conformance

PACKAGE = Path(ddp_conformance.__file__ or "").parent
MODULES = ("facts", "subject", "rank", "models", "reference")
BY_METHOD = ("Rank", "Subject")


@dataclass(frozen=True)
class Piece:
    """One statement: its text, the names it binds, and the names and attributes in it."""

    text: str
    binds: frozenset[str]
    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    methods: tuple["Piece", ...] = ()
    case: bool = False
    source: str | None = None
    """What it is imported from; "" where it is a module itself."""


@dataclass
class Reached:
    """Every name and attribute that is mentioned in what is reached so far."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    def add(self, piece: Piece) -> None:
        self.names |= piece.names
        self.attributes |= piece.attributes

    def has(self, piece: Piece) -> bool:
        return not self.names.isdisjoint(piece.binds)

    def calls(self, method: Piece) -> bool:
        return any(name.startswith("__") or name in self.attributes for name in method.binds)


def sections(case: Path, program: str, imports: str, *rest: str) -> Iterator[str]:
    """
    The imports, then of each source the statements that are reached by `program` of the case module and by `rest`.

    `imports` are those that `rest` needs, as source.
    """
    sources = {f"{name}.py": pieces(PACKAGE / f"{name}.py") for name in MODULES}
    sources["the case"] = tuple(piece for piece in pieces(case) if not piece.case or program in piece.binds)
    known = [*_pieces(ast.parse(imports).body, []), *(piece for found in sources.values() for piece in found)]
    reached = Reached({program})
    for text in rest:
        reached.add(_root(text))
    kept: set[Piece] = set()
    while (
        new := {
            each for piece in known if reached.has(piece) for each in (piece, *filter(reached.calls, piece.methods))
        }
        - kept
    ):
        kept |= new
        for piece in new:
            reached.add(piece)
    yield _import_block(piece for piece in kept if piece.source is not None)
    for name, found in sources.items():
        if texts := [_text(piece, kept) for piece in found if piece in kept and piece.source is None]:
            yield "\n\n".join([f"# ---- {name}", *texts])


@cache
def pieces(path: Path) -> tuple[Piece, ...]:
    """The statements of a source without its docstrings, and without what only serves pytest and mypy."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_pieces(ast.parse("\n".join(lines)).body, lines))


def _pieces(body: Iterable[ast.stmt], lines: list[str]) -> Iterator[Piece]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imports(node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if is_case := any(ast.unparse(decorator).startswith("case(") for decorator in node.decorator_list):
                node.decorator_list = []
            if isinstance(node, ast.ClassDef) and node.name in BY_METHOD:
                methods = tuple(_pieces((each for each in node.body if isinstance(each, ast.FunctionDef)), lines))
                head = next(each for each in node.body if isinstance(each, ast.FunctionDef))
                text = "\n".join(lines[node.lineno - 1 : head.lineno - 1]).rstrip()
                yield Piece(text, frozenset({node.name}), methods=methods)
            else:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                text = "\n".join(lines[first - 1 : node.end_lineno])
                yield Piece(text, frozenset({node.name}), *_mentions(node), case=is_case)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            binds = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            yield Piece("\n".join(lines[node.lineno - 1 : node.end_lineno]), frozenset(binds), *_mentions(node))


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Piece]:
    """One piece for each name; of the suite's own modules there is nothing to import, for all stands in one."""
    for alias in node.names:
        name = alias.asname or alias.name
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_conformance"):
            if alias.name in MODULES:
                yield Piece(f"{name} = sys.modules[__name__]", frozenset({name}), frozenset({"sys"}))
            elif alias.asname:
                yield Piece(f"{name} = {alias.name}", frozenset({name}), frozenset({alias.name}))
        elif isinstance(node, ast.ImportFrom):
            yield Piece(ast.unparse(alias), frozenset({name}), source=node.module)
        else:
            yield Piece(ast.unparse(node), frozenset({name.partition(".")[0]}), source="")


def _mentions(node: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    names, attributes = set(), set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            names.add(each.id)
        elif isinstance(each, ast.Attribute):
            attributes.add(each.attr)
            if isinstance(each.value, ast.Name) and each.value.id in MODULES:
                names.add(each.attr)  # facts.text is text here
    return frozenset(names), frozenset(attributes)


@cache
def _root(text: str) -> Piece:
    return Piece(text, frozenset(), *_mentions(ast.parse(text)))


def _text(piece: Piece, kept: set[Piece]) -> str:
    return "\n\n".join([piece.text, *(method.text for method in piece.methods if method in kept)])


def _import_block(imported: Iterable[Piece]) -> str:
    """Plain imports before others, torch after the standard library, one line for each module."""
    by_module: dict[str, set[str]] = {}
    for piece in imported:
        by_module.setdefault(piece.source or piece.text, set()).add(piece.text)
    lines = {
        module if module in texts else f"from {module} import {', '.join(sorted(texts))}"
        for module, texts in by_module.items()
    }
    blocks = [
        sorted(line for line in lines if (line.split()[1].partition(".")[0] == "torch") is ours)
        for ours in (False, True)
    ]
    return "\n\n".join("\n".join(sorted(block, key=lambda line: line.startswith("from"))) for block in blocks)
