"""The server: 0xD3 over the network, before one propagator. Only the shell is here; frames are `wire`."""
