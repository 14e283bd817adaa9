"""The propagator, its producers and its settings: what a program that embeds the service uses."""
