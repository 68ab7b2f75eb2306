"""Throw-away environments for releases of torch: the next one is made while the last is in use."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from ci.cases import ROOT

NIGHTLY = "nightly"


class Broke(Exception):
    """No data for this release: the environment or the run broke off."""


def one_ahead(
    versions: Sequence[str], make: Callable[[str, Path], Path], keep: Path | None = None
) -> Generator[Future[Path], None, None]:
    """
    The interpreter for each release, in order, as `make` makes it in a folder; while one is in use the next is made.

    keep   where the folders stay; otherwise each goes when the next interpreter is asked for, and all go in the end
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="torch-", dir=keep))
        if keep is None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        coming = [pool.submit(make, version, folder / version) for version in versions[:1]]
        for place, version in enumerate(versions):
            ready = coming.pop()
            coming += [pool.submit(make, after, folder / after) for after in versions[place + 1 : place + 2]]
            yield ready
            if keep is None:
                shutil.rmtree(folder / version, ignore_errors=True)


def install(version: str, python: str, beside: Sequence[str], home: Path) -> Path:
    """A Python with this torch, what it needs beside it, and the suite; with a cache that goes when it goes."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise Broke("uv is not installed: pip install -e '.[dev]'")
    interpreter = home / "env" / "bin" / "python"
    uv = ["nice", "-n", "10", found]  # beside a run of the suite, whose cases have deadlines
    pip = [*uv, "pip", "install", "--quiet", "--python", str(interpreter)]
    commands = [[*uv, "venv", "--quiet", "--python", python, str(home / "env")]]
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
            raise Broke(f"uv ended with {done.returncode}: {last_line(done)}")
    return interpreter


def require_gpus(least: int, interpreter: Path) -> None:
    """Raise Broke where this torch finds fewer: with one GPU most cases of a world of two would be skipped in silence."""
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([str(interpreter), "-c", count], capture_output=True, text=True)
    if done.returncode:
        raise Broke(f"the GPUs cannot be counted: {last_line(done)}")
    if (found := int(done.stdout.split()[-1])) < least:
        raise Broke(f"at least {least} GPUs are needed, and this torch finds {found}")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr + "\n" + done.stdout).strip().splitlines()
    return lines[-1] if lines else "no output"
