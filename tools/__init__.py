"""What the checkout needs to look after itself: its set-up and the rules of its architecture."""
