"""The settings of all tests."""

pytest_plugins = ["support.settings"]
