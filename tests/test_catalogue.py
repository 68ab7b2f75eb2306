"""The catalogue of the contract is answered row by row: each has a case, or a reason that a reader can check."""

from ci.cases import all_cases

ROWS = {
    "A": 24,  # construction and initial sync
    "B": 18,  # gradient reduction
    "C": 6,  # no_sync
    "D": 7,  # buffers
    "E": 12,  # unused parameters
    "F": 9,  # static_graph
    "G": 7,  # gradient_as_bucket_view
    "H": 6,  # buckets
    "I": 14,  # communication hooks
    "J": 13,  # shipped hooks
    "K": 10,  # uneven inputs
    "L": 3,  # ignored parameters
    "M": 6,  # logging data
    "N": 4,  # serialization
    "O": 10,  # optimizer overlap, precision, other flags
    "P": 6,  # changes after wrapping
    "U": 28,  # observable and undocumented
}
"""How many rows each chapter of the catalogue has; Q, the checkpointing matrix, is one row."""

REASONS: dict[str, str] = {}
"""Rows without a case, and why. There is none."""


def test_every_row_has_a_case_or_a_reason():
    rows = {f"{chapter}{number:02}" for chapter, count in ROWS.items() for number in range(1, count + 1)} | {"Q"}
    answered = {row for case in all_cases() for row in case.catalogue}
    assert answered - rows == set(), "a case answers to a row that the catalogue does not have"
    assert rows - answered - REASONS.keys() == set(), "rows without a case or a reason"
    assert answered & REASONS.keys() == set(), "rows with a case and a reason for having none"
