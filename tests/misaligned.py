"""Files with weights at odd multiples of 4 bytes, for which MKL chooses other kernels than for torch's own memory."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch

#: Set by `scripts/test.sh --arithmetic avx2`: every file of weights that a test writes is misaligned.
WANTED = os.environ.get("MINBERT_TEST_MISALIGNED") == "1"


def misaligned(file: bytes) -> bytes:
    """A safetensors file with its float32 tensors at odd multiples of 4 bytes, as many of them as can be.

    The format allows no gap between tensors, and one of an odd number of numbers shifts the next by 4 bytes. Those
    are written last, and every second of them stays aligned to 8.
    """
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    metadata = {name: header.pop(name) for name in ("__metadata__",) if name in header}

    def last_if_odd(entry: dict) -> tuple[bool, bool, int]:
        start, end = entry["data_offsets"]
        return entry["dtype"] != "F32", (end - start) % 8 != 0, start

    parts, at = [], 0
    for entry in sorted(header.values(), key=last_if_odd):
        start, end = entry["data_offsets"]
        parts.append(data[start:end])
        entry["data_offsets"] = [at, at + end - start]
        at += end - start
    written = json.dumps({**metadata, **header}).encode()
    written += b" " * ((4 - len(written)) % 8)  # 8 bytes of length come before it
    return len(written).to_bytes(8, "little") + written + b"".join(parts)


def misalign(path: str | Path) -> None:
    """Rewrites a file of weights."""
    Path(path).write_bytes(misaligned(Path(path).read_bytes()))


@contextmanager
def misaligned_files() -> Iterator[None]:
    """Inside, torch's tensors are written misaligned, whoever writes them.

    `save_file`, `save` and `save_model` of `safetensors.torch`, which transformers, peft, accelerate and this package
    import by name, all end in these two functions, which they look up in their module.
    """
    serialize, serialize_file = safetensors.torch.serialize, safetensors.torch.serialize_file

    @functools.wraps(serialize)
    def to_bytes(*args, **kwargs):
        return misaligned(bytes(serialize(*args, **kwargs)))

    @functools.wraps(serialize_file)
    def to_file(tensors, filename, *args, **kwargs):
        serialize_file(tensors, filename, *args, **kwargs)
        misalign(filename)

    safetensors.torch.serialize, safetensors.torch.serialize_file = to_bytes, to_file
    try:
        yield
    finally:
        safetensors.torch.serialize, safetensors.torch.serialize_file = serialize, serialize_file
