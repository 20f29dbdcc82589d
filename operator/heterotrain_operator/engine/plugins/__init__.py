"""The parts of plugins that ask the API server: only one needs such a part."""

from heterotrain_operator.engine.plugins.claimed_devices import DeviceReader as ResourceReader

__all__ = ["ResourceReader"]
