"""The instruments of an audit, each fed with a run: what is trained or drawn, in resumable parts, and the finding."""

from collections.abc import Callable

from stobatch.auditing.finding import Finding
from stobatch.verbs.instruments.audited import Audited
from stobatch.verbs.instruments.certificates import of_certificates
from stobatch.verbs.instruments.many_runs import of_many_runs
from stobatch.verbs.instruments.membership import of_membership
from stobatch.verbs.instruments.one_run import of_one_run
from stobatch.verbs.instruments.releases import of_releases

MAKERS: dict[str, Callable[[Audited], list[Finding]]] = {
    "release": of_releases,
    "many_runs": of_many_runs,
    "one_run": of_one_run,
    "membership": of_membership,
    "certificates": of_certificates,
}
"""By name, in the order in which they are used."""

__all__ = ["MAKERS", "Audited"]
