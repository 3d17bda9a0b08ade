"""One of each thing that another package may add to stobatch."""
