"""The ``heterotrain`` command line."""
