"""What the adapters of all model families share: each patched forward, written once."""
