"""A picture shows the buckets that the fact names, in their order, each parameter as wide as its bytes."""

import re

import pytest

from ci import picture, sizes, table
from ci.table import Cell, Column

LAYER = [1 << 20, 2048]


def boxes(svg):
    """(title, width) of each parameter, in the order drawn."""
    found = re.findall(r'<rect [^>]*?width="([\d.]+)"[^>]*><title>([^<]*)</title>', svg)
    return [(title, float(width)) for width, title in found]


def row(facts, columns):
    """A stand-in for a row of the table: one case, whose facts differ by column."""
    return table.Row(None, None, "family.name", [Cell("holds", each) for each in facts[: len(columns)]])


def columns(*releases):
    return [Column(tuple(map(int, release.split("."))), "gloo:cpu", release) for release in releases]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[5 4, 3]", [[5, 4], [3]]),
        ("5 4, 3", [[5, 4], [3]]),
        ("[10]", [[10]]),
        ("[[0, 2], [1], [13]]", [[0, 2], [1], [13]]),
        ("[[0, False]]", None),
        ("[0.5]", None),
        ("(not shown)", None),
        ("[]", None),
    ],
)
def test_buckets_are_read_from_a_fact(text, found):
    assert picture.layout(text) == found


def test_a_parameter_that_is_reduced_again_begins_the_next_backward():
    assert picture.iterations([[0, 1], [1], [0], [1], [0]]) == [[[0, 1]], [[1], [0]], [[1], [0]]]
    assert picture.iterations([[2], [0]]) == [[[2], [0]]]


def test_each_backward_that_differs_is_drawn_once():
    known = row([{"buckets": "[0 1 2 3, 3 2, 1 0, 3 2, 1 0]"}], columns("2.4"))
    (drawn,) = picture.of_row(known, columns("2.4"), [4, 4, 4, 4])
    assert [label for label, _ in drawn.drawings] == ["backward 1", "backwards 2 to 3"]
    assert [title.split(",")[0][-1] for title, _ in boxes(drawn.drawings[1][1])] == list("3210")


def test_width_is_bytes_and_a_small_parameter_can_still_be_seen():
    found = boxes(picture.strips([[1, 0], [3, 2]], [*LAYER, 1 << 19, 2048], 2 << 20))
    assert [title for title, _ in found] == [
        f"parameter {at}, {of} bytes" for at, of in ((1, 2048), (0, 1 << 20), (3, 2048), (2, 1 << 19))
    ]
    small, large, _, half = (width for _, width in found)
    assert picture.SMALLEST <= small < large / 4
    assert half - picture.SMALLEST == pytest.approx((large - picture.SMALLEST) / 2, abs=0.1)


@pytest.mark.parametrize("known", [[0], [4] * 60])
def test_empty_and_many_parameters_can_still_be_seen(known):
    bucket = list(range(len(known)))
    assert {width for _, width in boxes(picture.strips([bucket], known, sum(known)))} == {picture.SMALLEST}


def test_sizes_that_do_not_fit_the_buckets_are_not_drawn():
    for known in ([4, 8], [4, 8, 4, 8]):
        (drawn,) = picture.of_row(row([{"buckets": "[0, 1 2]"}], columns("2.4")), columns("2.4"), known)
        assert {width for _, width in boxes(drawn.drawings[0][1])} == {picture.UNSIZED}
        assert "bytes" not in drawn.drawings[0][1]


def test_a_change_is_two_pictures_with_the_releases_that_show_them():
    facts = [{"buckets": "[1, 0]"}, {"buckets": "[1, 0]"}, {"buckets": "[1 0]"}]
    releases = columns("2.2", "2.3", "2.4")
    assert [each.caption for each in picture.of_row(row(facts, releases), releases)] == [
        "buckets, torch 2.2 to 2.3, gloo:cpu",
        "buckets, torch 2.4, gloo:cpu",
    ]


def test_what_was_never_measured_is_not_drawn():
    known = row([{"buckets": "[1, 0]"}], columns("2.2"))
    known.cells[0].verdict = "unmeasured"
    assert list(picture.of_row(known, columns("2.2"))) == []


def test_ranks_that_differ_are_drawn_apart():
    known = row([{"buckets": ["(not shown)", "[1, 0]", "[1, 0]"]}], columns("2.2"))
    assert [each.caption for each in picture.of_row(known, columns("2.2"))] == [
        "buckets, torch 2.2, gloo:cpu, ranks 1 and 2"
    ]


@pytest.mark.parametrize(
    ("fact", "value", "titles"),
    [
        ("line", "g1 g0 R0", ["the gradient of parameter 1 is ready", "the gradient of parameter 0 is ready", "the reduction of bucket 0 starts"]),
        ("last_order", "[1, 0]", ["the gradient of parameter 1 is ready", "the gradient of parameter 0 is ready"]),
    ],
)  # fmt: skip
def test_firing_and_ready_order_are_drawn_from_left_to_right(fact, value, titles):
    (drawn,) = picture.of_row(row([{fact: value}], columns("2.2")), columns("2.2"))
    assert [title for title, _ in boxes(drawn.drawings[0][1])] == titles


@pytest.mark.parametrize(
    ("fact", "value"),
    [("has_rebuilt_buckets", "1"), ("bucket_cap_bytes", "1048576"), ("order", "torch.float64 4"), ("alone", "1, 2")],
)
def test_a_fact_about_something_else_is_no_picture(fact, value):
    assert list(picture.of_row(row([{fact: value}], columns("2.2")), columns("2.2"))) == []


def test_bytes_are_those_of_the_model_that_the_case_wraps():
    asked = ["bucket_order.reversed", "bucket_cap.never_split", "rebuilt_buckets.order_from_first_of_group"]
    assert sizes.by_case(asked) == {
        "bucket_order.reversed": LAYER * 3,
        "bucket_cap.never_split": [4, 4000, 4],
    }


def test_a_case_is_begun_in_a_process_of_its_own():
    import torch.distributed as dist

    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    assert sizes.by_case(["rebuilt_buckets.tuned_first_limit"])
    assert before == dist._DEFAULT_FIRST_BUCKET_BYTES
