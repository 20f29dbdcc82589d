"""``python -m heterotrain_operator``."""

from heterotrain_operator.cli import main

main()
