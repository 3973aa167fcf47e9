"""What REST answers: shapes for people and programs. Nothing behind HTTP uses these."""

from everstep_services.history.api.dto.answer import Answer, PageOf, present
from everstep_services.history.api.dto.incidents import (
    Action,
    AlternativeOut,
    EvidenceOut,
    Incident,
    IncidentDetail,
    LedgerOut,
    OptionOut,
    Primary,
    VerdictOut,
)
from everstep_services.history.api.dto.jobs import (
    Allocation,
    BudgetOut,
    Exit,
    Job,
    JobDetail,
    Member,
    Round,
    RoundDetail,
    Stall,
    shown_exit,
)
from everstep_services.history.api.dto.nodes import Node
from everstep_services.history.api.dto.service import (
    FactOut,
    NewToken,
    Status,
    TokenOut,
    TokenWanted,
)

__all__ = [
    "Action",
    "Allocation",
    "AlternativeOut",
    "Answer",
    "BudgetOut",
    "EvidenceOut",
    "Exit",
    "FactOut",
    "Incident",
    "IncidentDetail",
    "Job",
    "JobDetail",
    "LedgerOut",
    "Member",
    "NewToken",
    "Node",
    "OptionOut",
    "PageOf",
    "Primary",
    "Round",
    "RoundDetail",
    "Stall",
    "Status",
    "TokenOut",
    "TokenWanted",
    "VerdictOut",
    "present",
    "shown_exit",
]
