"""What the trainer adds to gloo: waits with a limit, connections that can be cut, and the default group."""
