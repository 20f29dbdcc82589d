"""In place of a part of setuptools that was removed in version 82: AdaptDL 0.2.11 still imports it.

It uses it for a message to its own scheduler only, which the guide does not run.
"""
