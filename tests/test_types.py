"""A type error in ci/ turns lint red, for mypy answers with Any where it does not follow an import."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.runs import ROOT

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed"),
]

PLANTED = """
from ddp_conformance.golden import release

wrong: str = release("2.4")
"""


def test_a_type_error_planted_in_ci_is_found(tmp_path):
    for name in ("ci", "fixtures"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "reports"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "ci" / "planted.py").write_text(PLANTED)
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ci/planted.py:4: error: Incompatible types in assignment" in done.stdout
