"""What cannot be judged on this machine, build or Python is a list: an id that joins it is a case that went dark."""

import inspect
import subprocess
import sys

import pytest
from ddp_conformance.lanes import Lane
from ddp_conformance.record import read
from ddp_conformance.subject import BUILDS

from ci.cases import ROOT, all_cases

pytestmark = pytest.mark.timeout(600)  # a run of two dozen cases, on a machine that may be busy

WITHOUT_GPU = {
    "collectives.inputs_moved/dict",
    "collectives.inputs_moved/list",
    "collectives.inputs_moved/namedtuple",
    "collectives.inputs_moved/packed_sequence",
    "collectives.inputs_moved/tuple",
    "construction.multi_device/device_ids",
    "construction.multi_device/output_device",
    "ignored.not_cast",
    "optimizer_overlap.in_backward/copies",
    "optimizer_overlap.in_backward/views",
    "optimizer_overlap.in_backward_divides_late",
    "precision.buffers",
    "precision.divides_late",
    "precision.forward_in_narrow",
}
WITHOUT_BF16_IN_THE_BUILD = {"shipped_hooks.bf16/python", "shipped_hooks.bf16/wrapper"}
WITHOUT_FSDP_ON_THIS_PYTHON = {
    "optimizer_overlap.fused_arguments/by_name",
    "optimizer_overlap.fused_arguments/by_position",
    "optimizer_overlap.fused_no_sync",
    "optimizer_overlap.fused_only_one",
    "optimizer_overlap.fused_steps/w2",
    "optimizer_overlap.fused_steps/w3",
    "optimizer_overlap.fused_subset",
    "optimizer_overlap.fused_unknown",
}
MAY_BE_DARK = {
    "device:cuda": WITHOUT_GPU,
    "build:bf16_allreduce": WITHOUT_BF16_IN_THE_BUILD,
    "build:fsdp": WITHOUT_FSDP_ON_THIS_PYTHON,
}


def may_lack_data(case):
    """Whether the case, or a facet of it, asks for what only some builds or machines have, or for a lane without CPU."""
    asked = [*case.needs, *BUILDS] if any(name in inspect.getsource(case.program) for name in BUILDS) else case.needs
    return any(name in BUILDS for name in asked) or not Lane("gloo", "cpu").admitted_by(case.lanes)


def test_no_case_went_dark(tmp_path):
    claims = sorted({case.claim for case in all_cases() if may_lack_data(case)})
    record = tmp_path / "run.jsonl"
    options = [f"--claim={claim}" for claim in (*claims, "mean_gradients.mean")]  # a run that judges nothing is red
    command = [sys.executable, "-m", "pytest", "-q", "--lane=gloo:cpu", f"--record={record}", *options]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    dark = {line["id"] for line in read(record).cases if line["verdict"] == "no data"}
    assert dark == set().union(*(ids for name, ids in MAY_BE_DARK.items() if not BUILDS[name]()))
