"""Audits: measure what training leaks, try to break certificates, and say what was found with its confidence.

An audit is one-sided. A bound above the claim refutes it; a bound below it, or an attack that failed, is evidence of
nothing but the attack's own strength. Nothing here knows which method it audits.
"""
