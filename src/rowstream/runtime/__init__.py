"""The embedded engine: the `Engine` protocol, its first implementation and what both share."""
