"""Draws labs/lab-NN/images/*.png anew: `python -m labs.kit.author.pictures [lab-NN ...]`."""

import sys
from importlib import import_module

from labs.kit.judge.manifest import find_lab, lab_ids


def main(*labs: str) -> None:
    for lab in [find_lab(name) for name in labs or lab_ids()]:
        module = import_module(f"labs.kit.author.pictures.{lab.id.replace('-', '_')}")
        for picture in module.PICTURES:
            path = lab.file("images") / f"{picture.__name__.replace('_', '-')}.png"
            path.parent.mkdir(exist_ok=True)
            size = picture().save(path, picture.__doc__)
            print(f"{path.parent.parent.name}/images/{path.name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
