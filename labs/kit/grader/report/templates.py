"""Where the reports' templates lie."""

from pathlib import Path

ASSETS = Path(__file__).with_name("assets")
