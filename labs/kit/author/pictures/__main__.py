"""Draw labs/lab-NN/images/*.svg anew: `python -m labs.kit.author.pictures [lab-NN ...]`."""

import sys
from importlib import import_module

from labs.kit.author.pictures.sheet import Sheet
from labs.kit.judge.manifest import find_lab, lab_ids

for lab in [find_lab(name) for name in sys.argv[1:] or lab_ids()]:
    module = import_module(f"labs.kit.author.pictures.{lab.id.replace('-', '_')}")
    for draw, height in module.PICTURES.items():
        sheet, path = Sheet(height), lab.file("images") / f"{draw.__name__.replace('_', '-')}.svg"
        path.parent.mkdir(exist_ok=True)
        draw(sheet)
        print(f"{lab.id}/images/{path.name}: {sheet.save(path) / 1000:.0f} kB")
