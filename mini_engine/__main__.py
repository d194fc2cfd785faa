"""`python -m mini_engine` is `mini-engine`."""

from mini_engine.commands import main

main()
