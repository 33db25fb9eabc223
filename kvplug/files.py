"""A file of tensors with a header: written whole or not at all, and read only if it is just what was written.

The container is safetensors, so nothing in a file is ever run. Must never know what the tensors mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

# What the metadata of a file says it is, and the newest version that can be read.
FORMAT, VERSION = "kvplug cache", 1
ACCEPTED = "a file that `cache.save` wrote is accepted"

Path = str | os.PathLike[str]


def refusal(path: Path, why: str, accepted: str = ACCEPTED) -> ValueError:
    """The error that a file gives, to be raised."""
    return ValueError(f"path={os.fspath(path)!r} {why}; {accepted}")


def write(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, object], format: str = FORMAT) -> None:
    """Writes a file in the place of one that may be there, which stays as it is until the new one is whole.

    Args:
        tensors: by name, on any device, views too: what they show is written and nothing else.
        header: what JSON can hold.
        format: what the file says that it is.

    Raises:
        ValueError: `path` is a folder.
        OSError: it can't be written there; an older file is as it was.
    """
    # A link stays one.
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise refusal(path, "is a folder", "the name of a file is accepted")
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(
            f"path={os.fspath(path)!r} is in a folder that doesn't exist; one that does is accepted"
        )
    text = json.dumps(header)
    tensors = _apart(tensors)
    about = {"format": format, "version": str(VERSION), "header": text, "sha256": _digest(VERSION, text, tensors)}
    passing = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(8)}.tmp")
    try:
        with open(passing, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(tensors, passing, metadata=about)
        # Who may read it is as for any new file: safetensors lets nobody else.
        os.chmod(passing, mode)
        _flush(passing)
        os.replace(passing, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        if isinstance(error, SafetensorError):
            raise OSError(f"path={os.fspath(path)!r} can't be written: {error}") from error
        raise
    if os.name == "posix":
        # The new name outlives a power cut too.
        _flush(os.path.dirname(target))


def read(
    path: Path, format: str = FORMAT, accepted: str = ACCEPTED
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Header and tensors of a file. The tensors are on the host and may be pages of the file: copy what stays.

    Args:
        format: what the file has to say that it is.
        accepted: what is accepted, for the error message.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none that `write` wrote, it is of a newer version, or it isn't as it was written.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"path={os.fspath(path)!r} doesn't exist; {accepted}")
    if not os.path.isfile(path):
        raise refusal(path, "is not a file", accepted)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if about.get("format") != format:
                raise refusal(path, f"holds tensors but no {format}", accepted)
            version = _version(path, about.get("version", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, UnicodeDecodeError) as error:
        raise refusal(path, f"is not a {format}, or is damaged ({error})", accepted) from error
    text = about.get("header", "")
    if _digest(version, text, tensors) != about.get("sha256"):
        raise refusal(path, "is damaged: its contents are not what was written", "an unchanged copy is accepted")
    return json.loads(text), tensors


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the tensors show, on the host, each in a storage of its own and without the rest of a view's."""
    found: dict[str, torch.Tensor] = {}
    storages = set()
    for name, x in tensors.items():
        x = x.detach().to("cpu").contiguous()
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes or storage.data_ptr() in storages:
            x = x.clone()
        found[name] = x
        storages.add(x.untyped_storage().data_ptr())
    return found


def _version(path: Path, version: str) -> int:
    if not version.isdecimal() or int(version) < 1:
        raise refusal(path, f"is damaged: its version is {version!r}")
    if int(version) > VERSION:
        raise refusal(
            path,
            f"has version {int(version)} of the format",
            f"up to version {VERSION} is accepted, and a newer kvplug reads more",
        )
    return int(version)


def _flush(path: Path) -> None:
    """Waits until what was written of a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(version: int, text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a version and a header, and of the names, dtypes, shapes and bytes of the tensors."""
    found = hashlib.sha256(f"{version}\n{text}".encode())
    for name, x in sorted(tensors.items()):
        found.update(f"\n{name} {x.dtype} {tuple(x.shape)}\n".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
