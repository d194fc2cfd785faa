"""`python -m mini_engine` is `mini-engine`."""

from mini_engine.cli import main

main()
