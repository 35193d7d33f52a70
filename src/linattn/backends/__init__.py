"""The ways to run a recurrence. Every backend implements :class:`~linattn.backends._protocol.Backend`."""
