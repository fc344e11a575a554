"""Edits of an edited file as edits of the file itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltafuse.edits import Edit
from deltafuse.protobuf import WireError, fields

_END = 1 << 62


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of the edited file: copied from `start` of the file where `edit` is None, else part of the new bytes."""

    length: int
    start: int
    edit: Edit | None = None

    def part(self, begin: int, end: int) -> _Piece:
        if self.edit is None:
            return _Piece(end - begin, self.start + begin)
        return _Piece(end - begin, self.start, self.edit._replace(new=self.edit.new[begin:end]))


def pieces(edits: Sequence[Edit]) -> Iterator[tuple[int, int, str]]:
    """Where in the edited file new bytes lie: begin, end and the site of their edit."""
    position = 0
    for piece in _pieces(edits):
        if piece.edit is not None:
            yield position, position + piece.length, piece.edit.site
        position += piece.length


def compose(first: Sequence[Edit], second: Sequence[Edit], *, nested: bool = False) -> tuple[Edit, ...]:
    """The edits of a file that do what `second` does to what `first` makes of it.

    Args:
        first: of the file, in its order.
        second: of the edited file, in its order.
        nested: what `second` puts among the new bytes of an edit of a site belongs to that site.
    """
    rest = list(_pieces(first))[::-1]
    out: list[Edit] = [edit._replace(new=b"") for edit in first if edit.end > edit.start]
    position, place = 0, 0  # in the edited file, in the file

    def take(until: int, *, keep: bool, by: Edit | None = None) -> None:
        nonlocal position, place
        while position < until and rest:
            piece = rest.pop()
            if position + piece.length > until:
                rest.append(piece.part(until - position, piece.length))
                piece = piece.part(0, until - position)
            if piece.edit is None:
                place = piece.start + piece.length
                if not keep and by is not None:
                    out.append(Edit(piece.start, place, b"", by.site, by.kind))
            else:
                place = max(place, piece.start)
                if keep:
                    out.append(Edit(place, place, piece.edit.new, piece.edit.site, piece.edit.kind))
            position += piece.length

    for edit in second:
        take(edit.start, keep=True)
        around = rest[-1].edit if rest else None
        site = around.site if nested and around is not None and around.site else edit.site
        if edit.new:
            out.append(Edit(place, place, edit.new, site, edit.kind))
        take(edit.end, keep=False, by=edit)
    take(_END, keep=True)
    # New bytes come before what is removed at their place, and in their own order.
    return tuple(sorted(out, key=lambda edit: (edit.start, edit.end)))


def joined(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits, those together that put parts of one field at one place: what changes inside a node that is new.

    They belong to the first site among them.
    """
    found: list[Edit] = []
    parts: list[Edit] = []
    for edit in edits:
        if edit.end > edit.start or (parts and parts[0].start != edit.start):
            found += parts
            parts = []
        if edit.end > edit.start:
            found.append(edit)
            continue
        parts.append(edit)
        whole = b"".join(part.new for part in parts)
        if edit.kind == "size" and len(parts) == 1:
            found += parts
            parts = []
        elif _is_whole(whole):
            site = next((part.site for part in parts if part.site), "")
            found.append(parts[0]._replace(new=whole, site=site))
            parts = []
    return (*found, *parts)


def _is_whole(new: bytes) -> bool:
    """Whether some bytes are fields from their beginning to their end."""
    try:
        for _ in fields(new, 0, len(new)):
            pass
    except WireError:
        return False
    return True


def _pieces(edits: Sequence[Edit]) -> Iterator[_Piece]:
    position = 0
    for edit in edits:
        if edit.start > position:
            yield _Piece(edit.start - position, position)
        if edit.new:
            yield _Piece(len(edit.new), edit.start, edit)
        position = max(position, edit.end)
    yield _Piece(_END, position)
