"""Adapters for other libraries. Each is imported by name; `import epbuf` imports none."""
