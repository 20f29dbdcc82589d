"""Volcano, KAI and the coscheduling plugin: pods that are placed together."""
