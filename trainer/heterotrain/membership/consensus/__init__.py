"""Consensus of survivors on the next formation: Paxos, the election that carries it, peer state, rendezvous."""
