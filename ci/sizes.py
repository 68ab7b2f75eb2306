"""
How many bytes each parameter of a case's model has: the program is begun without ranks and stopped where it wraps.

For the pictures alone, which draw a bucket parameter by parameter; no verdict rests on it. Programs set variables of torch
and of the process before they wrap, so they are begun in a fork that ends with what they set.
"""

import multiprocessing
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NoReturn, cast

import torch
from ddp_conformance.case import Case
from ddp_conformance.rank import Rank
from ddp_conformance.reference import sizes
from ddp_conformance.subject import Subject
from torch import nn

from ci.cases import all_cases


class Wrapped(Exception):
    """The program has come to where it wraps this module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Stops:
    """A subject that wraps nothing."""

    def wrap(self, module: nn.Module, **options: Any) -> NoReturn:
        raise Wrapped(module)


def by_case(ids: Collection[str]) -> dict[str, list[int]]:
    """Case id -> the bytes of each trainable parameter, in order; without those cases that cannot be begun like this."""
    if not ids:
        return {}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(_all, frozenset(ids)).result()
        except BrokenProcessPool:
            return {}


def _all(ids: frozenset[str]) -> dict[str, list[int]]:
    torch.set_num_threads(1)
    found = {}
    for case in all_cases():
        for facet in case.facets():
            asked = case.id(facet) in ids and case.of == "subject" and not case.may  # not what may die on its way
            if asked and (known := _of(case, facet.world, facet.key)):
                found[case.id(facet)] = known
    return found


def _of(case: Case, world: int, key: str | None) -> list[int] | None:
    rank = Rank(0, world, torch.device("cpu"), cast(Subject, Stops()), lambda message: None)
    try:
        case.program(rank, *([] if key is None else [case.each[key]]))
    except Wrapped as reached:
        return sizes(parameter for parameter in reached.module.parameters() if parameter.requires_grad)
    except Exception:
        return None  # it needs a process group before it wraps
    return None
