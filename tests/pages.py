"""The site of all kept records, with a release that could not be measured and a small kill matrix, built once a run."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ci import report
from ci.diff import RECORDS

ABSENT = "uv ended with 1: no wheel of torch 9.9.9 for this machine"
KILLS = {
    "torch": "2.13.0",
    "mutants": [
        {
            "name": "mean_gradients:SumsGradients",
            "promise": "Breaks the mean: gradients are summed.",
            "breaks": ["mean_gradients.mean"],
            "base": "tests.reference_ddp:ReferenceDDP",
            "caught_by": ["mean_gradients.mean/w2", "mean_gradients.mean/w3", "no_sync.accumulates"],
            "tried": 30,
            "broad": False,
        },
        {
            "name": "of_torch:RaisesAlways",
            "promise": "Breaks everything: its constructor raises.",
            "breaks": ["construction.needs_a_group"],
            "base": "torch.nn.parallel:DistributedDataParallel",
            "caught_by": ["mean_gradients.mean/w2", "retired.claim"],
            "tried": 30,
            "broad": True,
        },
        {
            "name": "of_torch:IsNotSeen",
            "promise": "Breaks a promise that no case is about.",
            "breaks": ["no_sync.accumulates"],
            "base": "torch.nn.parallel:DistributedDataParallel",
            "caught_by": [],
            "tried": 30,
            "broad": False,
        },
    ],
    "unbroken_laws": [{"claim": "mean_gradients.mean", "law": "one is one", "reason": "arithmetic of the case's own"}],
}


@cache
def site() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pages-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "9.9.9.nodata").write_text(f"{ABSENT}\n")
    (folder / "kills.json").write_text(json.dumps(KILLS))
    kept = sorted(str(path) for path in RECORDS.glob("*.jsonl.gz"))
    arguments = [*kept, str(folder / "9.9.9.nodata"), "--kills", str(folder / "kills.json"), "-o", str(folder / "site")]
    assert report.main(arguments) == 0
    return folder / "site"
