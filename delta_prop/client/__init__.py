"""0xD3 clients."""
