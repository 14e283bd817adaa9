"""Credit (a hard bound), and the controller of the rate of each pacing sink."""
