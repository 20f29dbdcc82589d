"""How the gradients of members meet: buckets, the sums over their owners, and the gate behind the sums."""
