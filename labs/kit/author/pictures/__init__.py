"""The figures of the labs' READMEs, drawn from traces of real runs: `python -m labs.kit.author.pictures`.

A file a lab; its `PICTURES` are functions that return a Sheet, whose docstring is kept in the PNG.
"""
