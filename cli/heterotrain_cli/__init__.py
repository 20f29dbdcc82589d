"""The ``heterotrain`` command line: forecast and simulate."""
