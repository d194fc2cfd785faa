"""Run notebooks on the reference and save them with their outputs, without traces of this machine.

`python -m labs.kit.author.notebooks FILE ...`
"""

import os
import sys
from pathlib import Path
from typing import Any


def save(path: Path) -> None:
    """Run a notebook in its folder, with the kernel `python3`. Raise nbclient's error if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    options: dict[str, Any] = {"store_widget_state": False, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, kernel_name="python3", resources=folder, **options).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            # The live panel's id is of no use in another kernel; its text is kept.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main(*paths: str) -> None:
    os.environ.pop("LAB_IMPL", None)
    for path in map(Path, paths):
        save(path.resolve())
        print(f"{path}: run and saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
