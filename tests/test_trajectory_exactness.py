"""
No value in the trajectories of conformance/test_trajectory.py needs more than 53 bits, so float64 holds every one exactly.

The training is done again in `fractions`, one process and W ranks, and every sum is bounded: over the power of two that
divides all its terms, the terms' magnitudes add up to less than 2**53. So no order of summation, and no fused
multiply-add, can round anything. (The loss itself is left out: no gradient is computed from its value.)
"""

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "trajectory", Path(__file__).parent.parent / "conformance" / "test_trajectory.py"
)
assert SPEC and SPEC.loader
trajectory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(trajectory)

LONGEST = 53


class Ledger:
    """Adds terms up, and remembers the most bits that any partial sum, in any order, could need."""

    def __init__(self) -> None:
        self.bits = 0

    def add(self, *terms: Fraction) -> Fraction:
        for term in terms:
            assert term.denominator & (term.denominator - 1) == 0, f"{term} is no binary fraction"
        scale = max((term.denominator for term in terms), default=1)
        self.bits = max(self.bits, int(sum(abs(term) for term in terms) * scale).bit_length())
        return sum(terms, Fraction(0))


def gradients(ledger: Ledger, weights: list[Fraction], rows: list, factor: Fraction) -> list[Fraction]:
    """The gradient of `factor` times the summed squared error over the rows, for two weights and a bias."""
    features = [(Fraction(first), Fraction(second), Fraction(1)) for first, second, _ in rows]
    errors = [
        ledger.add(*(w * x for w, x in zip(weights, each, strict=True)), -Fraction(row[2]))
        for each, row in zip(features, rows, strict=True)
    ]
    found = []
    for index in range(3):
        terms = [2 * error * each[index] for error, each in zip(errors, features, strict=True)]
        ledger.add(*terms)
        found.append(ledger.add(*(factor * term for term in terms)))
    return found


def train(ledger: Ledger, world: int, ranks: bool, momentum: Fraction, factor: Fraction) -> list:
    """The weights after every step: of `world` ranks whose gradients are averaged, or of one process with all batches."""
    (first, second), bias = trajectory.START
    weights = [Fraction(value) for value in (first, second, bias)]
    velocity = [Fraction(0)] * 3
    path = [weights]
    for step in range(trajectory.STEPS):
        batches = [trajectory.batch(step, rank) for rank in range(world)]
        if ranks:
            own = [gradients(ledger, weights, rows, factor) for rows in batches]
            mean = [ledger.add(*(value / world for value in each)) for each in zip(*own, strict=True)]
        else:
            mean = gradients(ledger, weights, [row for rows in batches for row in rows], factor / world)
        velocity = [ledger.add(momentum * v, g) for v, g in zip(velocity, mean, strict=True)]
        weights = [ledger.add(w, -Fraction(trajectory.RATE) * v) for w, v in zip(weights, velocity, strict=True)]
        path.append(weights)
    return path


MEAN = Fraction(1, trajectory.ROWS)


@pytest.mark.parametrize("momentum", [Fraction(0), Fraction(1, 2)], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    ("world", "factor"),
    [(1, MEAN), (2, MEAN), (4, MEAN), (3, 3 * MEAN), (2, Fraction(1)), (4, Fraction(1))],
    ids=["mean_w1", "mean_w2", "mean_w4", "thrice_the_mean_w3", "summed_w2", "summed_w4"],
)
def test_no_value_needs_more_than_53_bits(world, factor, momentum):
    ledger = Ledger()
    ranks = train(ledger, world, True, momentum, factor)
    one = train(ledger, world, False, momentum, factor)
    assert ranks == one, "W ranks and one process go the same way"
    assert ledger.bits <= LONGEST
    assert len({tuple(weights) for weights in ranks}) == trajectory.STEPS + 1, "every step moves the weights"


def test_the_ledger_sees_a_value_that_is_too_long():
    ledger = Ledger()
    ledger.add(Fraction(1), Fraction(1, 2**53))
    assert ledger.bits > LONGEST
