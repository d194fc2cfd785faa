"""What each kind of page may load and run: the book's, the labs', the player's. See docs/hosting.md.

A page carries its policy in itself, for hosts that send no headers of ours; `_headers` says the same.
"""

LABS = ("lab-01", "lab-02", "lab-03", "lab-06")  # those that need no tensors
OWN = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'"
TEXT = f"{OWN}; frame-src 'self'; form-action 'self'"  # quizzes and notebooks as well
SEARCH = f"{TEXT}; connect-src 'self'"  # it reads the pages that it found
# Pyodide is compiled when it is loaded; no text becomes a script.
LAB = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src 'self' data:; frame-src 'self'; base-uri 'none'; form-action 'none'"
)
WORKER = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'"
PLAYER = "default-src 'none'; script-src 'self'; style-src 'self'"
# Which a page cannot say in itself.
FRAMED = "frame-ancestors 'self'"
