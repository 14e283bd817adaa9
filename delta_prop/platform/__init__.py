"""The real world behind ports: clock, randomness, threads, sockets, TLS, files, the event loop."""
