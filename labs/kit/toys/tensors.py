"""Two tensors that should be equal: where they differ, in words. It works on tensors, and imports no torch.

`assert_rows` is for what has a row a token or a request: it names the rows that are wrong, whose they
are, and what they have in common. `assert_close` is for a tensor that is one thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests of labs without torch import this module, too
    from torch import Tensor

SHOWN = 4  # requests that are named one by one


@dataclass(frozen=True)
class Owner:
    """The owner of a row. `past` counts its tokens in the cache, `pads` the padded columns beside it.

    A row that is one of several of its request has a `position`. What is None is left unsaid.
    """

    request_id: str
    position: int | None = None
    past: int | None = None
    pads: int | None = None

    def __str__(self) -> str:
        return self.request_id if self.position is None else f"{self.request_id} at {self.position}"

    @property
    def stands(self) -> str:
        """Return what a mask or a table has to do with it: " (21 in the past, 7 pads)"."""
        said = []
        if self.past is not None:
            said.append(f"{self.past} in the past" if self.past else "no past")
        if self.pads is not None:
            said.append(f"{self.pads or 'no'} pad{'s' * (self.pads != 1)}")
        return f" ({', '.join(said)})" if said else ""


def assert_close(actual: Tensor, expected: Tensor, what: str, atol: float = 1e-9) -> None:
    """`actual` equals `expected` to `atol` in every element; shapes must agree.

    The AssertionError names `what`, the largest difference and where it is.
    """
    __tracebackhide__ = True
    _same_shape(actual, expected, what)
    if actual.numel() == 0:
        return
    if actual.isnan().any():
        where = actual.isnan().nonzero()[0].tolist()
        raise AssertionError(f"{what}: NaN, first at {where}")
    difference = (actual.double() - expected.double()).abs()
    worst = difference.max().item()
    if worst > atol:
        where = (difference == worst).nonzero()[0].tolist()
        raise AssertionError(f"{what}: off by {worst:.3g} at {where} (allowed: {atol:g})")


def assert_rows(
    actual: Tensor,
    expected: Tensor,
    what: str,
    owners: Sequence[Owner | str],
    *,
    others: Mapping[str, Tensor] | None = None,
    pool: tuple[Tensor, Tensor] | None = None,
    atol: float = 1e-9,
) -> None:
    """Row i of `actual`, which belongs to owners[i], equals row i of `expected` to `atol`.

    An owner may be a word, as for a slot that nothing may be written to. `pool` is a memory that the
    call was to write or to read, (as it was before, as it is now): the message says whether it changed.
    `others` are rows that belong nowhere in `actual`, by owner: a wrong row may be one of them.

    The AssertionError says which rows are wrong and which are right, whether the wrong ones have a past
    or pads, and whether one of them is the row of another.
    """
    __tracebackhide__ = True
    _same_shape(actual, expected, what)
    if len(owners) != len(actual):
        raise ValueError(f"{len(actual)} rows have {len(owners)} owners")
    if actual.numel() == 0:
        return
    ours, theirs = (x.detach().double().reshape(len(owners), -1) for x in (actual, expected))
    off = (ours - theirs).abs().amax(dim=1).tolist()
    wrong = [row for row, distance in enumerate(off) if not distance <= atol]  # NaN is wrong, too
    if not wrong:
        return
    right = [row for row in range(len(owners)) if row not in wrong]
    rows = f"{len(owners)} row{'s' * (len(owners) != 1)}"
    lines = [
        f"{what}: {len(wrong)} of {rows} {'is' if len(wrong) == 1 else 'are'} wrong (allowed: {atol:g})",
        *_one_by_one(wrong, owners, ours, theirs, off),
        f"right: {_names(right, owners)}" if right else "right: no row",
        *_in_common(wrong, right, owners),
        *_of_another(wrong, owners, ours, theirs, others or {}, atol),
    ]
    if pool is not None:
        before, after = pool
        changed = ((before != after) & ~(before.isnan() & after.isnan())).any()
        lines += ["the pool did change" if changed else "the pool is as it was: nothing was written to it"]
    raise AssertionError("\n".join(lines))


def _same_shape(actual: Tensor, expected: Tensor, what: str) -> None:
    __tracebackhide__ = True
    shape = tuple(getattr(actual, "shape", ("no tensor",)))
    if shape != tuple(expected.shape):
        raise AssertionError(f"{what}: shape {shape} instead of {tuple(expected.shape)}")


def _one_by_one(
    wrong: list[int], owners: Sequence[Owner | str], ours: Tensor, theirs: Tensor, off: list[float]
) -> Iterable[str]:
    """A line for each request that has a wrong row."""
    groups = _by_request(wrong, owners)
    for rows in list(groups.values())[:SHOWN]:
        owner = owners[rows[0]]
        stands = owner.stands if isinstance(owner, Owner) else ""
        yield f"wrong: {_names(rows, owners)}{stands}: {_how_far(rows, ours, theirs, off)}"
    if len(groups) > SHOWN:
        yield f"wrong: {len(groups) - SHOWN} more"


def _how_far(rows: list[int], ours: Tensor, theirs: Tensor, off: list[float]) -> str:
    if ours[rows].isnan().any():
        return "NaN"
    if not ours[rows].any() and theirs[rows].any():
        return "zeros"
    return f"off by {max(off[row] for row in rows):.3g}"


def _in_common(wrong: list[int], right: list[int], owners: Sequence[Owner | str]) -> Iterable[str]:
    """Yield what distinguishes the wrong rows from the right ones."""
    for kind, name in (("a past", "past"), ("pads", "pads")):
        counts = [getattr(owner, name, None) for owner in owners]
        if not right or None in counts:
            continue
        for word, holds in (("with", [bool(n) for n in counts]), ("without", [not n for n in counts])):
            if all(holds[row] for row in wrong) and not any(holds[row] for row in right):
                yield f"the rows {word} {kind} are the wrong ones"


def _of_another(
    wrong: list[int],
    owners: Sequence[Owner | str],
    ours: Tensor,
    theirs: Tensor,
    others: Mapping[str, Tensor],
    atol: float,
) -> Iterable[str]:
    """Wrong rows that hold what another row should hold, or what another wrong row holds."""
    found = []
    for row in wrong[: 2 * SHOWN]:
        candidates = [
            *((f"what belongs to {owners[other]}", theirs[other]) for other in range(len(owners))),
            *((f"what belongs to {name}", other.double().flatten()) for name, other in others.items()),
            *((f"the same as {owners[other]}", ours[other]) for other in wrong if ours[row].any()),
        ]
        own = (f"what belongs to {owners[row]}", f"the same as {owners[row]}")
        equal = [what for what, other in candidates if bool(((other - ours[row]).abs() <= atol).all())]
        found += [f"{owners[row]} holds {what}" for what in equal if what not in own][:1]
    return found[:SHOWN]


def _by_request(rows: list[int], owners: Sequence[Owner | str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for row in rows:
        owner = owners[row]
        groups.setdefault(owner.request_id if isinstance(owner, Owner) else owner, []).append(row)
    return groups


def _names(rows: list[int], owners: Sequence[Owner | str]) -> str:
    """The requests of some rows: "r0, r2 at 6 to 9"; no more than fit a line."""
    groups = _by_request(rows, owners)
    shown = list(groups.items())[: 2 * SHOWN]
    names = [f"{name}{_positions(owners[row] for row in group)}" for name, group in shown]
    return ", ".join(names) + (f" and {len(groups) - len(names)} more" if len(groups) > len(names) else "")


def _positions(owners: Iterable[Owner | str]) -> str:
    at = [o.position for o in owners if isinstance(o, Owner) and o.position is not None]
    if not at:
        return ""
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(at), 1) if b != a + 1), len(at)]
    runs = [at[start:end] for start, end in pairwise(breaks)]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:SHOWN]]
    return f" at {', '.join(shown)}" + (" ..." if len(runs) > SHOWN else "")
