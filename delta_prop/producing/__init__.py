"""What every producer keeps about its origins, in this process and on the network: the core of both."""
