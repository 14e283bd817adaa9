"""Tools of the checkout: its set-up, and the rules of its architecture and of its language."""
