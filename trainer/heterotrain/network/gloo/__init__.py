"""The trainer's additions to gloo: waits with a limit, connections that can be cut, and the default group."""
