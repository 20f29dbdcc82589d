"""One TCP connection between every two ranks: how it is made, and messages over all of them at once."""
