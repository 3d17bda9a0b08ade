"""The paper's Figures 2 to 9 made again: what each needs, what is there of it, the runs, the records, the pictures."""
