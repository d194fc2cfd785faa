"""Old names of the API, which work for one more release, and the new name of each.

The new names are vLLM's. `alias` keeps an old name on one of our classes, `adopt` lets an object that
defines only an old name be used, and `modernized` reads a file that was written with old names.
"""

import re
from typing import Any, TypeVar

NAMES = {"find_prefix": "get_computed_blocks", "publish": "cache_blocks", "sampling": "sampling_params"}
# As an attribute, or where a method is defined; not in other names and not in prose.
_USES = re.compile(rf"(?<=\.)({'|'.join(NAMES)})\b|(?<=def )({'|'.join(NAMES)})\b(?=\()")
Part = TypeVar("Part")


class alias:
    """`publish = alias("cache_blocks")`: an old name of a method or attribute of the same class."""

    def __init__(self, new: str):
        self.new, self.__doc__ = new, f"Old name of `{new}`, for one more release."

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __get__(self, instance: Any, cls: type) -> Any:
        method = vars(self.owner).get(self.new)  # not a subclass's: its own may call this one
        return method.__get__(instance, cls) if callable(method) else getattr(instance, self.new)


def adopt(part: Part) -> Part:
    """Return a part that has the new name of each method that its class defines under the old one."""
    classes = type(part).__mro__
    for old, new in NAMES.items():
        defines = next((name for c in classes for name in (new, old) if name in vars(c)), new)
        if defines == old:
            setattr(part, new, getattr(part, old))
    return part


def modernized(source: str) -> str:
    """Return Python source with the new names in place of the old ones; the lines stay the same."""
    return _USES.sub(lambda found: NAMES[found[0]], source)


def old_names(source: str) -> dict[str, str]:
    """Return {old name: new name} of the old names that Python source uses."""
    return {found[0]: NAMES[found[0]] for found in _USES.finditer(source)}
