"""Opens the student edition's sealed modules. Where files are graded this module is absent."""

import base64
import hashlib
import zlib
from types import CodeType


def opened(packed: str, name: str) -> CodeType:
    """Return the code of a sealed module."""
    data = base64.b64decode(packed)
    pad = hashlib.shake_256(name.encode()).digest(len(data))
    return compile(zlib.decompress(bytes(map(int.__xor__, data, pad))), f"<{name}, sealed>", "exec")
