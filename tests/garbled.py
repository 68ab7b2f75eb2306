"""Files that are broken in every way: what they are made from, how they are garbled, and what a refusal is."""

import json

from ddp_conformance import record
from hypothesis import settings
from hypothesis import strategies as st

GOLDEN = """\
# A comment that a person wrote.
[plain]
fact = "1"
laws = 2

["by/release"]
fact = { "1.13" = "a", "2.4" = ["b", "c"], "2.9" = false }
offered = { "1.13" = "no", "2.0" = "yes" }

[["by/release".broken]]
since = "2.4"
until = "2.9"
lane = "gloo:cpu"
law = "one is two"
link = "pytorch/pytorch#1"

[["by/release".note]]
since = "2.4"
text = "why"

["by/release".lane."nccl:cuda"]
fact = "n"
"""
RUN = {
    "line": "run",
    "format": record.FORMAT,
    "torch": "2.13.0",
    "subject": "torch.nn.parallel:DistributedDataParallel",
    "build": "cpu",
    "lanes": ["gloo:cpu"],
}
CASE = {
    "line": "case",
    "id": "family.plain",
    "test": "test_family.py::test_plain",
    "level": "MUST",
    "lane": "gloo:cpu",
    "world": 2,
    "verdict": "changed",
    "facts": {"fact": ["1", "2"], "laws": 1},
    "laws": {"one is one": {"held": 2, "broken": 0}},
    "why": "é",
    "seconds": 0.1,
    "program": "0" * 16,
}
END = {"line": "end", "selected": 2, "collected": 2, "judged": 2, "complete": True}
LINES = [RUN, CASE, {**CASE, "id": "family.by/release", "facts": {"fact": "d"}}, END]
MANY = 10_000_000

often = settings(derandomize=True, max_examples=300, deadline=None)

spots = st.lists(
    st.tuples(st.integers(0, 2**16), st.integers(0, 20), st.binary(max_size=20)), min_size=1, max_size=3
)  # where, how many bytes are replaced, by what


def garbled(content, places):
    for where, length, other in places:
        start = where % len(content) if content else 0
        content = content[:start] + other + content[start + length :]
    return content


def written(lines):
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


RECORD = written(LINES)


def one_line_about(path, error):
    assert str(error).startswith(f"{path}: ")
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < len(str(path)) + 400
