"""What verbs return and run directories hold: one frozen, versioned class for each document. Imports no torch.

`to_dict()` is what files and `--json` hold, `from_dict` its inverse; the JSON schemas are in docs/schemas.
"""

from stobatch.results.accuracy import AttackedShare, ClassShare, Difference, Gap, Share, ShareAt, TTest, at_radius
from stobatch.results.audit import (
    CERTIFICATES,
    MEMBERSHIP,
    PRIVACY,
    WITH_SECRET_SEEDS,
    Audit,
    BoundCounts,
    CertificateDetails,
    Claim,
    EpsilonBound,
    Evidence,
    Finding,
    FindingDetails,
    Histogram,
    MembershipDetails,
    MembershipRates,
    PrivacyDetails,
    Rate,
    Roc,
    judge_claims,
    name_of,
    overall_verdict,
    recheck,
    untested,
)
from stobatch.results.budget import BookedRun, Budget, PlannedSpending, SpentShare, epsilon_words
from stobatch.results.certificates import (
    CertificateSummary,
    CertifiedAccuracies,
    Chosen,
    Kind,
    PriorCertificates,
    VerifiedAccuracy,
)
from stobatch.results.checks import (
    Check,
    ClassCount,
    DataCheck,
    DataFault,
    Dealt,
    Health,
    HealthCheck,
    HealthReport,
    Outcome,
    PersonCount,
    RepeatedRecords,
    RunGuarantee,
    ShardFolder,
    Source,
    TrainedRun,
    Verification,
)
from stobatch.results.comparison import (
    AttackedSpread,
    CertifiedSpread,
    ComparedFlag,
    ComparedRow,
    ComparedTest,
    Comparison,
    ReportSummary,
    SeedsGuarantee,
    SettingsTest,
    Spread,
)
from stobatch.results.document import Document, Part
from stobatch.results.figure import (
    FigureMade,
    FigurePoint,
    FigureRun,
    FiguresMade,
    FigureTest,
    LearningCurve,
    PaperNumber,
)
from stobatch.results.prediction import Exported, Prediction, Predictions, ProbeCheck
from stobatch.results.prior import PriorCard, PriorSource
from stobatch.results.scores import (
    WORST,
    Attack,
    Pictures,
    PriorScores,
    ProbeRecords,
    Protocol,
    ProtocolTable,
    SameImages,
    SanityFlag,
    Scores,
    ScoreSummary,
    of_attack,
)
from stobatch.results.search import CandidateRow, Candidates, Search, Winner
from stobatch.results.training import (
    DataDigests,
    DatasetFacts,
    FederatedTraining,
    FederationAccount,
    HistoryRow,
    ListedFile,
    Made,
    Manifest,
    NetworkFacts,
    Participation,
    PartyAccount,
    PlanDocument,
    PlannedNumber,
    StartedRun,
    Statement,
    Training,
    is_old,
)

DOCUMENTS: dict[str, type[Document]] = {
    "plan": PlanDocument,
    "config": StartedRun,
    "training": Training,
    "manifest": Manifest,
    "certificates": CertificateSummary,
    "attack": Attack,
    "scores": Scores,
    "audit": Audit,
    "evidence": Evidence,
    "comparison": Comparison,
    "verification": Verification,
    "doctor": HealthReport,
    "federation": FederationAccount,
    "participation": Participation,
    "federated-training": FederatedTraining,
    "trained-run": TrainedRun,
    "guarantee": RunGuarantee,
    "report": ReportSummary,
    "shards": ShardFolder,
    "data-check": DataCheck,
    "predictions": Predictions,
    "export": Exported,
    "budget": Budget,
    "search": Search,
    "candidates": Candidates,
    "prior": PriorCard,
    "figures": FiguresMade,
    "figure-point": FigurePoint,
    "learning-curve": LearningCurve,
}
"""Every document, by the name of its schema in docs/schemas."""
