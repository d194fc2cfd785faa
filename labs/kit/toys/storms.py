"""What a lab's storm.py is made of."""

from typing import Any

Script = dict[str, Any]  # {"config": {...}, "calls": [[name, *arguments], ...]}, all of it JSON


class Skip(Exception):
    """A call that has no place in the script as it went so far; raised by `Play`, it leaves the call out."""
