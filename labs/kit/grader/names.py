"""Names and texts from outside, made safe for file systems, terminals and reports."""

import hashlib
import re
import unicodedata

# The last one is a folder's page.
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9]|index)(\..*)?", re.IGNORECASE)


def safe(name: str) -> str:
    """Return a student's name as a file name for any system. A name that has to change gets a digest."""
    text = unicodedata.normalize("NFC", name)
    clean = re.sub(r"^\W+", "_", re.sub(r"[^\w@+., -]", "_", text).strip(" ."))
    if RESERVED.fullmatch(clean):
        clean = clean.replace(".", "_")  # whatever follows the dot, the name would stay reserved
    elif clean and clean == text and len(clean.encode()) <= 150:
        return clean
    short = clean.encode()[:140].decode(errors="ignore").strip("_ .") or "student"
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{short}-{digest}"


def shown(name: str) -> str:
    """Return a file name for a report: one line of at most 120 characters, with unprintable ones escaped."""
    text = printable(name)
    return text if len(text) <= 120 else f"{text[:70]}...{text[-45:]}"


def printable(text: str) -> str:
    """Return a line with all characters escaped that could move a cursor or turn the line around."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
