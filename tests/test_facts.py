"""Facts are canonical: the same value is the same text, and text that a golden file cannot hold is refused."""

import pytest
import torch
from ddp_conformance import facts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([[2.0, 2.0]]), "[[2.0, 2.0]]"),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "bf16[2] 1.0 2.0"),
        (torch.full((512, 512), 1.5), "262144 x 1.5"),
        (torch.full((9,), 3, dtype=torch.int64), "i64[9] 9 x 3"),
        (torch.empty(0), "f32[0]"),
        (torch.tensor(1.5), "1.5"),
        (torch.tensor([1 + 2j]), "c64[1] (1+2j)"),
        (None, "None"),
        (True, "True"),
        ([1, [2.0, "three"]], "[1, [2.0, three]]"),
        ({"b": 1, "a": None}, "{b: 1, a: None}"),
        ({2, 1}, "{1, 2}"),
        (torch.float16, "torch.float16"),
    ],
)
def test_a_value_has_one_text(value, text):
    assert facts.text(value) == text


def test_a_sparse_tensor_shows_coalesced_indices():
    tensor = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert facts.text(tensor) == "sparse[3] at [[1]]: [3.0]"


@pytest.mark.parametrize("value", ["two\nlines", "caf\u00e9", "x" * 3000])
def test_text_that_a_golden_file_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match="a fact is"):
        facts.text(value)


def test_an_object_without_canonical_text_is_refused():
    with pytest.raises(TypeError, match="no canonical text for a object"):
        facts.text(object())
