"""Dynamic resource allocation: devices that pods claim."""
