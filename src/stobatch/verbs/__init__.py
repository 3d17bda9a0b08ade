"""The verbs: plan, train, certify, attack, evaluate, audit, report, shard, compare. The command line calls only them.

Each verb checks everything it can before it writes anything, so bad input leaves no half-written run.
"""

from stobatch.verbs.attacking import attack, evaluate
from stobatch.verbs.auditing import audit
from stobatch.verbs.certifying import certify
from stobatch.verbs.comparing import compare
from stobatch.verbs.reporting import report
from stobatch.verbs.sharding import check_shards, shard
from stobatch.verbs.training import plan, train

__all__ = ["attack", "audit", "certify", "check_shards", "compare", "evaluate", "plan", "report", "shard", "train"]
