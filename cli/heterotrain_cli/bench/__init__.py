"""``heterotrain bench``: how a script scales on this machine."""
