"""assert_rows: which rows of a tensor are wrong, whose they are, and what they have in common."""

import re

import pytest

from labs.kit import Owner, assert_rows

torch = pytest.importorskip("torch", reason="it is tensors that are compared")
EXPECTED = torch.arange(1.0, 13.0).reshape(4, 3)
OWNERS = [
    Owner("a", past=21, pads=7),
    Owner("b", past=14, pads=7),
    Owner("c", past=0, pads=1),
    Owner("d", past=2, pads=0),
]


def said(actual, expected=EXPECTED, owners=OWNERS, **more):
    with pytest.raises(AssertionError) as failure:
        assert_rows(actual, expected, "logits", owners, **more)
    return str(failure.value).splitlines()


def changed(*rows, to=None):
    tensor = EXPECTED.clone()
    for row in rows:
        tensor[row] = tensor[row] + 0.5 if to is None else torch.as_tensor(to)
    return tensor


def test_equal_rows_pass():
    assert_rows(EXPECTED.clone(), EXPECTED, "logits", OWNERS)
    assert_rows(EXPECTED + 1e-4, EXPECTED, "logits", OWNERS, atol=1e-3)
    assert_rows(EXPECTED[:0], EXPECTED[:0], "logits", [])


def test_wrong_rows_are_named_with_past_and_pads_and_so_are_the_right_ones():
    assert said(changed(1)) == [
        "logits: 1 of 4 rows is wrong (allowed: 1e-09)",
        "wrong: b (14 in the past, 7 pads): off by 0.5",
        "right: a, c, d",
    ]


def test_what_the_wrong_rows_have_in_common_is_said():
    assert "the rows without a past are the wrong ones" in said(changed(2))
    assert "the rows with a past are the wrong ones" in said(changed(0, 1, 3))
    assert "the rows with pads are the wrong ones" in said(changed(0, 1, 2))
    assert not [line for line in said(changed(0, 2)) if "the wrong ones" in line]
    assert said(changed(0, 1, 2, 3))[-1] == "right: no row"


def test_a_row_of_another_request_is_recognized_here_or_not():
    assert said(changed(1, to=EXPECTED[3]))[-1] == "b holds what belongs to d"
    assert said(changed(0, 2, to=[7.0, 7.0, 0.0]))[-1] == "c holds the same as a"
    stranger = torch.tensor([5.0, 5.0, 5.0])
    assert said(changed(1, to=stranger), others={"e": stranger})[-1] == "b holds what belongs to e"


def test_nan_and_zeros_are_called_so():
    lines = said(changed(0, to=float("nan")))
    assert lines[1] == "wrong: a (21 in the past, 7 pads): NaN"
    assert said(changed(3, to=0))[1] == "wrong: d (2 in the past, no pads): zeros"


def test_rows_of_one_request_are_put_together():
    owners = [Owner("a", position) for position in (3, 4, 5)] + ["a free slot"]
    lines = said(changed(0, 1, 3), owners=owners)
    assert lines[1:4] == ["wrong: a at 3 to 4: off by 0.5", "wrong: a free slot: off by 0.5", "right: a at 5"]
    assert "wrong: a at 3, 5:" in said(changed(0, 2), owners=owners)[1]


def test_what_is_not_known_is_not_said():
    assert [Owner("a", past=1).stands, Owner("a", pads=1).stands] == [" (1 in the past)", " (1 pad)"]
    assert said(changed(0), owners=["w", "x", "y", "z"])[1:] == ["wrong: w: off by 0.5", "right: x, y, z"]


def test_whether_the_pool_changed_is_said_and_a_shape_is_a_matter_of_its_own():
    before = torch.zeros(2, 2)
    assert said(changed(0), pool=(before, before.clone()))[-1].startswith("the pool is as it was")
    assert said(changed(0), pool=(before, before + 1))[-1] == "the pool did change"
    assert said(EXPECTED[:3]) == ["logits: shape (3, 3) instead of (4, 3)"]
    assert re.match(r"logits: shape \('no tensor',\)", said(None)[0])


def test_many_requests_stay_a_few_lines():
    many, owners = torch.zeros(60, 3), [Owner(f"r{row}", past=row) for row in range(60)]
    lines = said(many + torch.arange(60.0)[:, None], many, owners)
    assert len(lines) < 12 and "wrong: 55 more" in lines
    assert max(map(len, lines)) < 120
