"""Adapters, one file per engine; nothing here is imported unless its engine is used."""
