"""Arrays by name in npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from deltafuse.errors import UserError
from deltafuse.files import atomic

Array = npt.NDArray[np.generic]


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an npz file.

    Raises:
        UserError: ``inputs-missing``, ``inputs-unreadable``.
    """
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            found = {} if isinstance(arrays, np.ndarray) else {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise UserError("inputs-missing", f"{path} does not exist: check the path given with --inputs") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError("inputs-unreadable", f"{path} is no npz file ({error}): write it with numpy.savez") from None
    if not found:
        raise UserError("inputs-unreadable", f"{path} holds no arrays by name: write it with numpy.savez")
    return found


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes an npz file; unlike `numpy.savez` it takes any name.

    Raises:
        UserError: see `deltafuse.files.check_output`.
    """
    with atomic(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                npy.write_array(entry, np.asanyarray(array), allow_pickle=False)
