"""The server: the 0xD3 protocol over the network, for one service. `delta_prop_wire` encodes the frames."""
