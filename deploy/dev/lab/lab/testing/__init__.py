"""Run tests: ``make check`` while working, ``make test`` before landing, ``make test-all`` before a release."""
