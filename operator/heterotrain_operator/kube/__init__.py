"""The only access to the API server: a few verbs on the official asyncio client, the Lease, Events."""
