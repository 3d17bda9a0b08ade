"""Seeded hostile inputs for everything that reads what a user, a disk or another party hands over.

Each surface makes one case from a random generator: an input near a valid one, put through the real reader. A case ends
refused (a StobatchError with one line) or accepted (and then what was read is compared with what was meant). Anything
else, or more than 30 seconds, is a finding. `python -m tests.system.fuzz --help` runs any number of cases.
"""
