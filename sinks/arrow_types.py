"""Types of Arrow by what they hold, whatever the width of their offsets is; and the bytes of their values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as at


def is_text(kind: pa.DataType) -> bool:
    return bool(at.is_string(kind) or at.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(at.is_binary(kind) or at.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(at.is_list(kind) or at.is_large_list(kind))


def is_moment(kind: pa.DataType) -> bool:
    """A point in time, and not what a clock shows somewhere."""
    return bool(at.is_timestamp(kind) and kind.tz is not None)


def bytes_of(texts: pa.Array) -> np.ndarray:
    """Of all values, one after the other."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return np.zeros(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int64 if at.is_large_string(texts.type) else np.int32)
    return np.frombuffer(data, np.uint8)[bounds[texts.offset] : bounds[texts.offset + len(texts)]]
