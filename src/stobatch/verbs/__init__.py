"""The verbs: plan, train, certify, attack, evaluate, audit, report. The command line calls these and nothing else.

Each verb checks everything it can before it writes anything, so bad input leaves no half-written run.
"""

from stobatch.verbs.attacking import attack, evaluate
from stobatch.verbs.auditing import audit
from stobatch.verbs.certifying import certify
from stobatch.verbs.reporting import report
from stobatch.verbs.training import plan, train

__all__ = ["attack", "audit", "certify", "evaluate", "plan", "report", "train"]
