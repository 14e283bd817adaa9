"""Named faulty versions of the production code. The simulation must find each of them."""
