"""Draw labs/lab-NN/images/*.svg anew: `python -m labs.kit.author.pictures [lab-NN ...]`.

Every function of lab_NN.py that returns a Sheet is a picture.
"""

import sys
from importlib import import_module
from inspect import isfunction

from labs.kit.author.pictures.sheet import Sheet
from labs.kit.judge.manifest import find_lab, lab_ids

for lab in [find_lab(name) for name in sys.argv[1:] or lab_ids()]:
    module = import_module(f"labs.kit.author.pictures.{lab.id.replace('-', '_')}")
    for name, draw in vars(module).items():
        if isfunction(draw) and draw.__annotations__.get("return") is Sheet:
            path = lab.file("images") / f"{name.replace('_', '-')}.svg"
            path.parent.mkdir(exist_ok=True)
            print(f"{lab.id}/images/{path.name}: {draw().save(path) / 1000:.0f} kB")
