"""The ICML 2020 paper, whole: lemmas, plan, noise, losses, Algorithms 1, 3 and 4. Its claims do not hold."""
