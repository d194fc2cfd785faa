"""Tables on a terminal, whole however narrow it is."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(table: Table, console: Console | None = None) -> None:
    """As wide as its numbers are: rich would cut them to "1…", a narrow terminal only wraps the lines."""
    console = console or Console()
    table.width = Measurement.get(console, console.options.update(width=200), table).maximum
    console.print(table, crop=False)
