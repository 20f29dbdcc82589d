"""See ``torch``."""
