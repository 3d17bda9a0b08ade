"""Train classifiers with differential privacy and certified robustness, and see what is guaranteed and by whom."""
