"""The content security policy of each kind of page: the book's, the labs', the player's. See docs/hosting.md.

Each page contains its policy, for hosts that send no headers; the file `_headers` has the same policies.
"""

# The labs that need no tensors, and the first half of lab-08.
LABS = ("lab-01", "lab-02", "lab-03", "lab-06", "lab-08", "lab-09", "lab-11")
OWN = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'"
TEXT = f"{OWN}; frame-src 'self'; form-action 'self'"  # for quizzes and notebooks too
RUNNING = f"{TEXT}; worker-src 'self'"  # the worker has its own, WORKER
SEARCH = f"{TEXT}; connect-src 'self'"  # it loads the pages that it found
# Pyodide is compiled when it is loaded; no text becomes a script.
LAB = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src 'self' data:; frame-src 'self'; base-uri 'none'; form-action 'none'"
)
WORKER = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'"
PLAYER = "default-src 'none'; script-src 'self'; style-src 'self'"
# This part cannot be set inside a page.
FRAMED = "frame-ancestors 'self'"


def policy_of(page: str) -> str:
    """Return the policy of a page of the book, by its path in the site."""
    if page == "search.html":
        return SEARCH
    return RUNNING if page == "docs/index.html" or page.startswith("docs/concepts/") else TEXT
