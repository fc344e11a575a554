"""Where the data of external tensors lies, and the bytes of one tensor of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deltafuse.errors import UserError
from deltafuse.reasons import TEXTS, Reason
from deltafuse.wording import number

if TYPE_CHECKING:
    from deltafuse.tensors import TensorHead
    from deltafuse.wire import Model

TEXTS.update(
    {
        "external-data-missing": "the constant {name} lies in {location}, which is not there; put the file beside the "
        "model",
        "external-data-short": "the constant {name} lies at bytes {offset} to {end} of {location}, which ends before; "
        "copy the file again",
        "external-data-outside": "the constant {name} lies in {location}, outside the model's folder; move it beside "
        "the model, or give --allow-outside",
    }
)

#: Bytes of a file's path, as Linux has it.
_LONGEST = 4095


def locate(folder: Path, location: str, *, allow_outside: bool = False) -> Path:
    """Path of an external data file.

    Args:
        folder: where the model lies.
        location: as the model says.
        allow_outside: the file may lie anywhere.

    Raises:
        UserError: ``outside-folder``: the location is absolute or leaves `folder`, by ``..`` or by a symbolic link;
            ``external-data-damaged``: no file can have that name.
    """
    if "\0" in location or len(location.encode()) > _LONGEST:
        raise UserError(
            "external-data-damaged", f"{location[:40]!r}... is no name of an external data file: save the model again"
        )
    path = folder / location
    inside = not Path(location).is_absolute() and path.resolve().is_relative_to(folder.resolve())
    if allow_outside or (inside and ".." not in Path(location).parts):
        return path
    raise UserError(
        "outside-folder",
        f"the external data file {location!r} lies outside the model's folder {folder}: "
        "move it into the folder and save the model again with the new location, or, if you know what the file is, "
        "give --allow-outside",
    )


def external_bytes(model: Model, head: TensorHead, name: str, size: int) -> bytes | Reason:
    """Reads the `size` bytes of one tensor that lies outside of the model file."""
    location = head.external.get("location", "")
    try:
        path = locate(model.path.parent, location, allow_outside=model.allow_outside)
        offset, length = head.offset, head.length or size
    except UserError as error:
        if error.code == "outside-folder":
            return Reason("external-data-outside", {"name": name, "location": location})
        return Reason("constant-damaged", {"name": name, "error": error})
    if length != size:
        return Reason("constant-damaged", {"name": name, "error": f"{number(length, 'byte')} at {offset}, not {size}"})
    if not path.is_file():
        return Reason("external-data-missing", {"name": name, "location": location})
    if offset + size > path.stat().st_size:
        end = offset + size
        return Reason("external-data-short", {"name": name, "location": location, "offset": offset, "end": end})
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)
