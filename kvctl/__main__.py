"""``python -m kvctl``: the same as ``kvctl``."""

from kvctl.cli.main import main

main()
