"""What the shipped sinks take on this machine, as laws to draw from; and predictions beside measurements."""
